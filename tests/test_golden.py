"""The pytest plugin: the fixture `golden_graph` in test sessions of their own, and the text it compares."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
import torch
from fx_forms import Layer, export

from graphrewrite import pytest_plugin
from graphrewrite.errors import InputError
from graphrewrite.graph_text import graph_text

TEST = """
import pytest

def test_text(golden_graph):
    golden_graph("func.func @f() {\\n  %7 = x\\n}\\n", "graph")

def test_without_golden():
    pass
"""
SAME = "func.func @f() {\n  %0 = x\n}\n"
OTHER = "func.func @f() {\n  %0 = y\n}\n"


@pytest.fixture
def session(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.delenv("CI", raising=False)
    # Loading the installed plugins anew takes two seconds in each session.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_ADDOPTS", f"-p {pytest_plugin.__name__} --strict-markers")
    pytester.makepyfile(test_it=TEST)
    return pytester


def golden_file(session: pytest.Pytester) -> Path:
    return session.path / "golden" / "graph.txt"


def write_golden(session: pytest.Pytester, text: str) -> None:
    golden_file(session).parent.mkdir()
    golden_file(session).write_text(text, encoding="utf-8")


def test_same_text_passes(session: pytest.Pytester) -> None:
    write_golden(session, SAME)
    session.runpytest().assert_outcomes(passed=2)


def test_other_text_fails_and_shows_the_difference(session: pytest.Pytester) -> None:
    write_golden(session, OTHER)
    result = session.runpytest()
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "golden/graph.txt differs.",
            "--- golden/graph.txt (expected)",
            "+++ golden/graph.txt (produced)",
            " func.func @f() {",
            "-  %0 = y",
            "+  %0 = x",
            "*`pytest --update-golden 'test_it.py::test_text'`*",
        ]
    )
    result.stdout.no_fnmatch_line("*pytest_plugin.py*")  # the difference, and no traceback of the fixture
    assert golden_file(session).read_text(encoding="utf-8") == OTHER


def test_a_long_difference_is_cut(session: pytest.Pytester) -> None:
    write_golden(session, "\n".join(map(str, range(1000))) + "\n")
    session.runpytest().stdout.fnmatch_lines(["... and 8?? more lines"])


def test_missing_file_fails_and_is_not_written(session: pytest.Pytester) -> None:
    result = session.runpytest()
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        ["golden/graph.txt does not exist*", "*`pytest --update-golden 'test_it.py::test_text'`*"]
    )
    assert not golden_file(session).exists()


@pytest.mark.parametrize("before", [None, OTHER], ids=["missing", "different"])
def test_update_writes_what_golden_tests_produce(session: pytest.Pytester, before: str | None) -> None:
    if before is not None:
        write_golden(session, before)
    session.runpytest("-m", "golden", "--update-golden").assert_outcomes(passed=1, deselected=1)
    assert golden_file(session).read_text(encoding="utf-8") == SAME


def test_update_leaves_an_unchanged_file(session: pytest.Pytester) -> None:
    write_golden(session, SAME)
    before = golden_file(session).stat().st_mtime_ns
    session.runpytest("--update-golden").assert_outcomes(passed=2)
    assert golden_file(session).stat().st_mtime_ns == before


def test_update_is_refused_in_ci(session: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    result = session.runpytest("--update-golden")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert not golden_file(session).exists()


@pytest.mark.parametrize(
    ("ini", "folder"),
    [
        ("", "tests/fusion/golden"),
        ("golden_folder = graphs/before-and-after", "tests/fusion/graphs/before-and-after"),
        ("golden_folder = ../golden", "tests/golden"),
        ("golden_folder = {rootdir}/golden", "golden"),
    ],
)
@pytest.mark.parametrize(
    ("test", "name"),
    [
        ("def test_layer(golden_graph):", "test_fusion.test_layer"),
        (
            "@pytest.mark.parametrize('form', ['O1 valid/length'])\ndef test_layer(form, golden_graph):",
            "test_fusion.test_layer-O1-valid-length",
        ),
        ("class TestLayer:\n  def test_it(self, golden_graph):", "test_fusion.TestLayer.test_it"),
    ],
)
def test_where_the_files_are(session: pytest.Pytester, ini: str, folder: str, test: str, name: str) -> None:
    session.makeini(f"[pytest]\n{ini}\n")
    path = session.path / "tests" / "fusion" / "test_fusion.py"
    path.parent.mkdir(parents=True)
    path.write_text(f"import pytest\n{test}\n      golden_graph('text')\n", encoding="utf-8")
    session.runpytest("--update-golden", path).assert_outcomes(passed=1)
    assert (session.path / folder / f"{name}.txt").read_text(encoding="utf-8") == "text\n"
    session.runpytest(path).assert_outcomes(passed=1)


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ("golden_graph('a'); golden_graph('b')", "*is compared twice in one test; give each graph a name*"),
        ("golden_graph('a', 'x'); golden_graph('b', 'x')", "*'x' is compared twice in one test*"),
        ("golden_graph('a', '../x')", "*'../x' is not the name of a file in *golden*"),
        ("golden_graph(3)", "*a builtins.int is not a graph: give a torch.export.ExportedProgram*"),
    ],
)
def test_misuse_is_said(session: pytest.Pytester, calls: str, message: str) -> None:
    session.makepyfile(test_misuse=f"def test(golden_graph):\n    {calls}\n")
    result = session.runpytest("--update-golden", "test_misuse.py")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([message])
    assert not (session.path / "x.txt").exists()


def renamed(model: ir.Model) -> ir.Model:
    """The model as another version of an exporter might name its inner values and nodes."""
    for index, node in enumerate(model.graph):
        node.name = f"other_{index}"
        for value in node.outputs:
            if not value.is_graph_output():
                value.name = f"val_{index}"
    return model


def onnx_model(text: str) -> ir.Model:
    return ir.from_proto(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 18]>\n{text}'))


BRANCHES = """
graph (float[N] x, bool c) => (float[N] y) {
    doubled = Add(x, x)
    y = If (c) <
        then_branch = yes () => (float[N] a) { a = Relu(doubled) },
        else_branch = no () => (float[N] b) { b = Neg(doubled) }
    >
}
"""
BRANCHES_TEXT = """\
opsets: ai.onnx 18
graph(
    x: float32[N]
    c: bool[]
) -> (
    y: float32[N]
):
    Add = Add(x, x)
    y = If<else_branch=..., then_branch=...>(c)
        else_branch(
        ) -> (
            b: float32[N]
        ):
            b = Neg(Add)
        then_branch(
        ) -> (
            a: float32[N]
        ):
            a = Relu(Add)
"""


def weighted() -> ir.Model:
    model = onnx_model("graph (float[2] x) => (float[2] y) { t = Mul(x, w) y = Reshape(t, s) }")
    for name, array in {"w": np.full(100, 0.1, np.float32), "s": np.array([2])}.items():
        value = next(v for node in model.graph for v in node.inputs if v is not None and v.name == name)
        value.const_value = ir.tensor(array, name=name)
        model.graph.register_initializer(value)
    return model


def test_the_text_of_weights_is_their_type() -> None:
    lines = graph_text(weighted()).splitlines()
    assert "    weight w: float32[100]" in lines and "    weight s: int64[1]{2}" in lines


def test_the_text_of_branches() -> None:
    assert graph_text(onnx_model(BRANCHES)) == BRANCHES_TEXT
    assert graph_text(ir.to_proto(onnx_model(BRANCHES))) == BRANCHES_TEXT
    assert graph_text(renamed(onnx_model(BRANCHES))) == BRANCHES_TEXT


class Toy(torch.nn.Module):
    def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        torch._check(c.item() <= 3)
        return torch.cond(c.sum() > 0, lambda t: t + 1, lambda t: t - 1, (x,)) * x


def toy_program() -> torch.export.ExportedProgram:
    sizes = {"x": {0: torch.export.Dim("rows", min=2, max=9)}, "c": None}
    return torch.export.export(Toy(), (torch.ones(4, 2), torch.tensor(1)), dynamic_shapes=sizes)


def test_the_text_of_a_torch_program_does_not_depend_on_names() -> None:
    program = toy_program()
    text, graph = graph_text(program), str(program.graph)
    for index, node in enumerate(program.graph.nodes):
        if node.op not in ("placeholder", "output"):
            node._rename(f"other_{index}")
    assert graph_text(program) == text and str(program.graph) != graph
    assert "x: float32[s0, 2]" in text and "for expression u0 <= 3'" in text
    assert "true_graph_0(" in text and " = aten.add.Tensor(x, 1)" in text
    assert graph_text(program.graph_module).splitlines()[0] == "module("


def test_the_text_of_a_program_says_what_buffers_take() -> None:
    text = graph_text(export(Layer("overlaid")).run_decompositions({}))
    assert "    b_keys_codes: int8[1, 32, 2, 16] = keys.codes\n" in text
    assert "    keys.codes <- getitem" in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "func.func @f(%arg0: i1) {\n  %12:2 = a %arg0\n  b %12#1\n}",
            "func.func @f(%arg0: i1) {\n  %0:2 = a %arg0\n  b %0#1\n}\n",
        ),
        (
            "func.func @f() {\n  %3 = x\n}\nfunc.func @g() {\n  %9 = x\n}",
            "func.func @f() {\n  %0 = x\n}\nfunc.func @g() {\n  %0 = x\n}\n",
        ),
        ('#loc = loc("/a/b.py":1:2)\n%5 = x loc("f"("/a (b).py":3:4))\n%6 = y %5 loc(#loc1)', "%0 = x\n%1 = y %0\n"),
        ('a = dense<"0x00FF"> : tensor<2xi8>', "a = dense<...> : tensor<2xi8>\n"),
        ("a = dense<1.0> : t\n\n{-#\n  dialect_resources: {}\n#-}\n", "a = dense<1.0> : t\n"),
    ],
    ids=["several results", "each function anew", "positions", "weights", "resources"],
)
def test_the_text_of_mlir(text: str, expected: str) -> None:
    assert graph_text(text) == expected


def test_the_text_of_an_mlir_module() -> None:
    mlir: Any = pytest.importorskip("torch_mlir.ir")
    with mlir.Context(), mlir.Location.file("somewhere.mlir", 1, 2):
        text = "func.func @f(%x: i32) -> i32 { %a = arith.addi %x, %x : i32 return %a : i32 }"
        module = mlir.Module.parse(text)
    expected = graph_text(str(module))
    assert "%0 = arith.addi %arg0, %arg0 : i32" in expected and "somewhere" not in expected
    assert graph_text(module) == expected and graph_text(module.operation) == expected


@pytest.mark.parametrize("thing", [3, None, torch.ones(1), lambda: 0])
def test_what_is_no_graph(thing: object) -> None:
    with pytest.raises(InputError, match="is not a graph: give a torch"):
        graph_text(thing)


def test_the_fixture_is_what_this_suite_uses(golden: Callable[[str, object], None], tmp_path: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"tests/golden/no-such-graph\.txt does not exist"):
        golden("no-such-graph", "text")

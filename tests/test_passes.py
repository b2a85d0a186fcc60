"""The passes in pipelines of other libraries: onnx_ir's, torch's and executorch's, and patterns from other packages."""

from __future__ import annotations

import abc
import importlib
import os
import subprocess
import sys
import types
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common_passes
import pytest
from fx_forms import Layer, export
from graph_text import fx_text, onnx_text
from onnx_forms import FORMS, SPELLED, build
from torch.export import ExportedProgram
from torch.fx.passes.infra.pass_manager import PassManager

import graphrewrite as gr
from graphrewrite.passes import FuseQuantizedSdpa, FuseQuantizedSdpaInGraphModule, FuseQuantizedSdpaInProgram

PASSES = (FuseQuantizedSdpa, FuseQuantizedSdpaInProgram, FuseQuantizedSdpaInGraphModule)


def refused() -> ir.Model:
    """A layer that is not fused, of whose inner values the model states no type and no shape."""
    narrow = SPELLED.replace(
        "{x}_difference = Sub({x}_wide, {x}_zeros_wide)",
        "{x}_narrow = Sub({x}_codes_out, {x}_zeros_out) {x}_difference = Cast<to=1>({x}_narrow)",
    )
    return build(dequantize=narrow)  # subtracts in int8, which wraps


def contents(model: ir.Model) -> bytes:
    return ir.to_proto(model).SerializeToString(deterministic=True)


@cache
def exported(flaw: str = "") -> ExportedProgram:
    return export(Layer("overlaid", flaw=flaw))


@pytest.mark.parametrize("form", FORMS)
def test_onnx_pass_in_a_sequence(form: str) -> None:
    model = FORMS[form]()
    graph, outputs = model.graph, [value.name for value in model.graph.outputs]
    fuse = FuseQuantizedSdpa(require=1)
    pipeline = ir.passes.Sequential(common_passes.CheckerPass(), fuse, common_passes.RemoveUnusedOpsetsPass())
    result = pipeline(model)
    assert result.modified and result.model is model and model.graph is graph
    assert [value.name for value in model.graph.outputs] == outputs
    assert len(fuse.report.sites) == 1
    onnx.checker.check_model(ir.to_proto(model))
    assert onnx_text(model) == onnx_text(gr.rewrite(FORMS[form]()).model)


def test_a_sequence_that_repeats_reports_what_all_runs_fused() -> None:
    fuse = FuseQuantizedSdpa()
    ir.passes.PassManager([fuse], steps=3, early_stop=True)(build())
    assert [(len(report.sites), report.already_fused) for report in fuse.reports] == [(1, 0), (0, 1)]
    assert (len(fuse.report.sites), fuse.report.already_fused, fuse.report.refusals) == (1, 0, ())


@pytest.mark.parametrize(
    ("run", "error"),
    [
        (lambda model: FuseQuantizedSdpa()(model), None),
        (lambda model: FuseQuantizedSdpa().explain(model), None),
        (lambda model: gr.rewrite(model), None),
        (lambda model: gr.explain(model), None),
        (lambda model: FuseQuantizedSdpa(require=1)(model), gr.RequirementNotMet),
        (lambda model: ir.passes.Sequential(FuseQuantizedSdpa(require=1))(model), ir.passes.PassError),
    ],
    ids=["pass", "explain of the pass", "rewrite", "explain", "requirement", "requirement in a sequence"],
)
@pytest.mark.parametrize("model", [refused, build], ids=["refused", "matched"])
def test_a_model_in_which_nothing_is_fused_stays_as_it_was(
    run: Callable[[ir.Model], object], error: type[Exception] | None, model: Callable[[], ir.Model]
) -> None:
    made = model()
    if model is build:
        made = gr.rewrite(made).model  # type: ignore[assignment]
        error = None
    before = contents(made)
    if error is None:
        run(made)
    else:
        with pytest.raises(error) as caught:
            run(made)
        cause = caught.value if isinstance(caught.value, gr.RequirementNotMet) else caught.value.__cause__
        assert isinstance(cause, gr.RequirementNotMet) and len(cause.report.refusals) == 1
    assert contents(made) == before


def test_unused_parts_of_the_model_that_were_there_before_are_kept() -> None:
    model = build(replace=(("key_last = Constant", "idle = Constant<value_int=1>() key_last = Constant"),))
    FuseQuantizedSdpa(require=1)(model)
    assert "idle" in {value.name for node in model.graph for value in node.outputs}
    assert not {node.op_type for node in model.graph} & {"DequantizeLinear", "Attention"}


def test_torch_program_pass() -> None:
    program = exported()
    text = fx_text(program)
    fuse = FuseQuantizedSdpaInProgram(require=1)
    result = fuse(program)
    assert result.modified and fx_text(program) == text
    assert fx_text(result.exported_program) == fx_text(gr.rewrite(program).model)
    again = fuse(result.exported_program)
    assert not again.modified and again.exported_program is result.exported_program
    assert len(fuse.report.sites) == 1 and fuse.reports[1].already_fused == 1


def test_torch_graph_module_pass_in_torchs_pass_manager() -> None:
    module = exported().run_decompositions({}).graph_module
    fuse = FuseQuantizedSdpaInGraphModule(require=1)
    result = PassManager(passes=[fuse], run_checks_after_each_pass=True)(module)
    assert result.modified and result.graph_module is module
    assert str(module.graph) == str(gr.rewrite(exported()).model.graph)  # type: ignore[union-attr]
    assert len(fuse.report.sites) == 1


def test_torch_graph_module_that_is_refused_stays_as_it_was() -> None:
    module = exported("scale-dtype").run_decompositions({}).graph_module
    text = str(module.graph)
    with pytest.raises(gr.RequirementNotMet, match="1 fused attentions are required and 0 found"):
        FuseQuantizedSdpaInGraphModule(require=1)(module)
    assert not FuseQuantizedSdpaInGraphModule()(module).modified
    assert str(module.graph) == text


@pytest.mark.parametrize("place", ["executorch.exir.pass_base", "executorch.exir.edge_program_manager_pass_base"])
def test_executorch_takes_the_program_pass_for_one_of_its_own(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for executorch: its base class, and what `transform` does with passes by their kind."""

    class ExportedProgramPassBase(abc.ABC):
        @abc.abstractmethod
        def call(self, exported_program: ExportedProgram) -> Any: ...

    def transform(program: ExportedProgram, passes: list[Any]) -> ExportedProgram:
        for one in passes:
            assert isinstance(one, ExportedProgramPassBase), "would be given a graph module"
            result = one(program)
            if result.modified:
                program = result.exported_program
        return program

    stand_in: Any = types.ModuleType(place)
    stand_in.ExportedProgramPassBase = ExportedProgramPassBase
    monkeypatch.setitem(sys.modules, place, stand_in)
    after = transform(exported(), [FuseQuantizedSdpaInProgram(require=1)])
    assert fx_text(after) == fx_text(gr.rewrite(exported()).model)


@pytest.mark.parametrize("kind", PASSES)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"current_tokens": "both"}, 'current_tokens: \'both\' is neither "exact" nor "quantized"'),
        ({"require": -1}, "require: -1 is not a number of sites"),
        ({"require": True}, "require: True is not a number of sites"),
        ({"require": "1"}, "require: '1' is not a number of sites"),
    ],
)
def test_bad_arguments(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(gr.InputError, match=message):
        kind(**options)


@pytest.mark.parametrize("kind", PASSES)
def test_a_pass_that_has_not_run_has_no_report(kind: Any) -> None:
    with pytest.raises(gr.InputError, match="has not run"):
        _ = kind().report


PATTERN = '''
"""Matches nothing, and says when it is asked."""

NAME = "{name}"


def match(attention, graph):
    print("asked")
'''

RUN = """
import graphrewrite as gr
from graphrewrite.patterns import load_patterns
from test_passes import refused

print(*(pattern.NAME for pattern in load_patterns()))
print(len(gr.explain(refused()).refusals))
"""


def test_patterns_of_another_package_are_found_by_their_entry_points(tmp_path: Path) -> None:
    """Laid out as pip installs one: modules, and a .dist-info folder beside them."""
    package, info = tmp_path / "their_patterns", tmp_path / "their_patterns-1.0.dist-info"
    package.mkdir(), info.mkdir()
    (package / "__init__.py").touch()
    (package / "form.py").write_text(PATTERN.format(name="their-form"), encoding="utf-8")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-patterns\nVersion: 1.0\n", encoding="utf-8")
    entries = "[graphrewrite.patterns]\ntheir-form = their_patterns.form\n"
    (info / "entry_points.txt").write_text(entries, encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", RUN], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    names, *asked, refusals = done.stdout.splitlines()
    assert names.split()[-1] == "their-form" and len(names.split()) > 1
    assert (asked, refusals) == (["asked"], "1")


def test_entry_points_of_this_package_name_things_that_exist() -> None:
    tomllib = pytest.importorskip("tomllib", reason="comes with Python 3.11")
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    assert {"pytest11", "torch_dynamo_backends"} <= groups.keys()
    for group in groups.values():
        for target in group.values():
            module, _, name = target.partition(":")
            loaded = importlib.import_module(module)
            assert not name or hasattr(loaded, name)

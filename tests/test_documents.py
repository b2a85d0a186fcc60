"""The pages of docs/: what they state is held to the code, and their examples run."""

from __future__ import annotations

import re
from pathlib import Path

import onnx_ir as ir
import pytest
import torch
from decoder_models import toy_decoder
from fx_forms import Layer, export, inputs

from graphrewrite import pytest_plugin
from graphrewrite.refusals import REFUSALS

DOCS = Path(__file__).parent.parent / "docs"


def code(page: str, language: str) -> list[str]:
    """The blocks of a language, in order."""
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)


def test_every_refusal_has_its_line_and_a_remedy() -> None:
    lines = re.findall(
        r"^\| `([\w-]+)` \| (.*?) \| (.*?) \|$", (DOCS / "refusals.md").read_text(encoding="utf-8"), re.M
    )
    assert [code for code, _, _ in lines] == sorted(REFUSALS)
    assert {code: meaning for code, meaning, _ in lines} == REFUSALS
    assert not [code for code, _, remedy in lines if len(remedy.split()) < 3]


def test_the_golden_graph_example(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    (test,) = code("golden-graphs.md", "python")
    (golden,) = code("golden-graphs.md", "text")
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_ADDOPTS", f"-p {pytest_plugin.__name__}")
    pytester.makepyfile(test_example=test)
    result = pytester.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*golden/test_example.test_toy.txt does not exist*", "*--update-golden*"])
    pytester.runpytest("--update-golden").assert_outcomes(passed=1)
    assert (pytester.path / "golden" / "test_example.test_toy.txt").read_text(encoding="utf-8") == golden
    pytester.runpytest().assert_outcomes(passed=1)
    (ini,) = code("golden-graphs.md", "ini")
    pytester.makeini(ini)
    pytester.runpytest("--update-golden").assert_outcomes(passed=1)
    assert (pytester.path / "tests" / "golden" / "test_example.test_toy.txt").exists()


class Attention(torch.nn.Module):
    """What the page calls a model: called with tokens and a position."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer("overlaid")

    def forward(self, tokens: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        count = tokens.shape[1]
        query = tokens[..., None, None].expand(1, count, 4, 16) * 1.0
        return self.layer(query, query[:, :, :2], query[:, :, 2:], position)


def test_the_pipeline_examples(capsys: pytest.CaptureFixture[str]) -> None:
    onnx_example, program_example, compile_example = code("pipelines.md", "python")
    exec(onnx_example, {"model": ir.from_proto(toy_decoder())})
    assert capsys.readouterr().out == "no attention found in this model\n"
    exec(program_example, {"program": export(Layer("overlaid"))})
    assert capsys.readouterr().out == "True 1 of 1 attention sites matched\n"
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=False):
        names = {"model": Attention().eval(), "tokens": torch.tensor([[1, 2, 3]]), "position": inputs(3, 0)[3]}
        exec(compile_example, names)
    assert capsys.readouterr().out == "['1 of 1 attention sites matched']\n"

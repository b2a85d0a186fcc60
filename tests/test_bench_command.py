"""The command `graphrewrite bench`, from its arguments to what it prints and writes."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest

from graphrewrite.bench import contender, limits, publish, tables
from graphrewrite.bench import layer as layers
from graphrewrite.cli import run
from graphrewrite.errors import InputError
from tests.decoder_models import toy_decoder


@pytest.fixture
def _small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "ReadLimit", lambda threads: limits.ReadLimit(threads, 1 << 20))
    monkeypatch.setattr(layers, "MultiplyLimit", lambda threads: limits.MultiplyLimit(threads, 32))
    monkeypatch.setattr(contender, "last_level_cache", lambda: 1 << 10)


TINY = ["--query-heads=4", "--kv-heads=2", "--head-size=32", "--threads=1", "--rounds=3", "--seconds=0"]


@pytest.mark.usefixtures("_small_limits")
def test_a_layer_is_measured_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    files = {kind: tmp_path / f"run.{kind}" for kind in ("json", "md", "png")}
    written = [f"--json={files['json']}", f"--markdown={files['md']}", f"--plot={files['png']}"]
    chosen = ["--contexts=16,32", "--prefill=8,4@16", "--schemes=int8,float32", "--peers=onnxruntime,unfused"]
    assert run(["bench", *TINY, *chosen, *written]) == 0
    assert "graphrewrite int8" in capsys.readouterr().out
    result = json.loads(files["json"].read_text(encoding="utf-8"))
    assert [case["name"] for case in result["cases"]] == ["decode 16", "decode 32", "prefill 8", "prefill 4 at 16"]
    for case in result["cases"]:
        assert len(case["contenders"]) == 6
        for one in case["contenders"]:
            assert len(one["samples"]) >= 3
            assert set(one["times_as_fast"]) == {"graphrewrite int8", "graphrewrite float32"}
            assert one["limit_is"] in ("read", "multiply")
    page = files["md"].read_text(encoding="utf-8")
    assert page.count("| graphrewrite int8 |") == 4
    assert files["png"].read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peers=nobody"], "unknown peer 'nobody'"),
        (["--schemes=int3"], "unknown scheme 'int3'"),
        (["--contexts=many"], "--contexts is 'many'"),
        (["--prefill=4@"], "give ROWS or ROWS@CONTEXT"),
        (["--prefill=8@4"], "8 rows do not fit"),
        (["--contexts=", "--prefill="], "nothing to measure"),
        (["--json=run.txt"], "give a .json file"),
        (["--markdown=run.txt"], ".md file"),
        (["--plot=run.txt"], "unknown suffix '.txt'"),
        (["--against=other.onnx"], "--against goes with a MODEL"),
        (["none.onnx"], "no such file"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", *TINY, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_models_are_measured_beside_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / name for name in ("one.onnx", "two.onnx")]
    for path, in_place in zip(paths, (True, False), strict=True):
        onnx.save(toy_decoder(48, in_place=in_place), path)
    file = tmp_path / "run.json"
    options = ["--contexts=20,40", "--steps=10", "--chunk=4", "--threads=1", f"--json={file}"]
    assert run(["bench", str(paths[0]), f"--against={paths[1]}", *options]) == 0
    assert "two.onnx" in capsys.readouterr().out
    result = json.loads(file.read_text(encoding="utf-8"))
    first, second = result["outcomes"]
    assert [speed["context"] for speed in first["speeds"]] == [20, 40]
    assert [speed["prompt"] for speed in first["speeds"]] == [10, 20]
    assert all(len(speed["steps"]) == 2 for speed in first["speeds"])
    # The two do not compute the same: one has the logits of all tokens, the other of the new ones.
    assert second["speeds"][0]["difference"] > 0 == first["speeds"][0]["difference"]
    # float32 caches [1,48,4], alternating where they cannot be written in place; a process has megabytes.
    assert (first["cache_bytes"], second["cache_bytes"]) == (48 * 4 * 4, 2 * 48 * 4 * 4)
    assert min(first["peak_bytes"], second["peak_bytes"]) > 1 << 20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--contexts=100"], "room for 48 positions"),
        (["--contexts=20,24", "--steps=5"], "no room for 5 steps"),
        (["--plot=run.png"], "--plot with a layer"),
    ],
)
def test_contexts_that_do_not_fit_a_model_are_refused(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "toy.onnx"
    onnx.save(toy_decoder(48), path)
    assert run(["bench", str(path), *options]) == 2
    assert message in capsys.readouterr().err


def test_figures_take_the_place_of_the_last_run(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Before.\n", encoding="utf-8")
    for key, text in (("a", "first"), ("b", "other"), ("a", "second")):
        publish.publish(page, key, text, [tables.Grid("t", ["", "x|y"], [["row", "1"]])], ["note"])
    written = page.read_text(encoding="utf-8")
    assert written.startswith("Before.\n") and "first" not in written
    assert written.index("second") < written.index("other")
    assert written.count("|  | x\\|y |") == 2
    page.write_text(publish.BEGIN.format(key="a"), encoding="utf-8")
    with pytest.raises(InputError, match="left as it is"):
        publish.publish(page, "a", "third", [], [])

"""Saved whole or not at all, and never over what is still read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from decoder_models import toy_decoder
from onnx import TensorProto, helper, numpy_helper

from graphrewrite import files
from graphrewrite.errors import InputError


def weights_model(rows: int = 400) -> onnx.ModelProto:
    """One matrix product; the weights are rows * 4 floats."""
    weights = np.arange(rows * 4, dtype=np.float32).reshape(rows, 4)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["a", "w"], ["b"])],
        "weights",
        [helper.make_tensor_value_info("a", TensorProto.FLOAT, [1, rows])],
        [helper.make_tensor_value_info("b", TensorProto.FLOAT, [1, 4])],
        [numpy_helper.from_array(weights, "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def weights_of(path: Path) -> Any:
    return numpy_helper.to_array(onnx.load(path).graph.initializer[0])


@pytest.mark.parametrize(
    ("external_data_from", "names"),
    [(1 << 30, ["out.onnx"]), (6400, ["out.onnx", "out.onnx.data"])],
    ids=["one file", "external data"],
)
@pytest.mark.parametrize("stored", [False, True], ids=["weights in memory", "weights in another folder's file"])
def test_saved_model_stands_alone(external_data_from: int, names: list[str], stored: bool, tmp_path: Path) -> None:
    model = ir.from_proto(weights_model())
    if stored:
        (tmp_path / "in").mkdir()
        ir.save(model, tmp_path / "in" / "in.onnx", external_data="in.data")
        model = ir.load(tmp_path / "in" / "in.onnx")
    folder = tmp_path / "out"
    folder.mkdir()
    files.save(model, folder / "out.onnx", external_data_from=external_data_from)
    assert sorted(os.listdir(folder)) == names
    np.testing.assert_array_equal(weights_of(folder / "out.onnx"), np.arange(1600, dtype=np.float32).reshape(400, 4))
    onnx.checker.check_model(str(folder / "out.onnx"))


def test_a_failure_leaves_the_older_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "out.onnx"
    target.write_bytes(b"older")

    def fail(model: ir.Model, path: Path, **_: Any) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ir, "save", fail)
    with pytest.raises(InputError, match=r"out\.onnx cannot be written: No space left on device"):
        files.save(toy_decoder(), target)
    assert os.listdir(tmp_path) == ["out.onnx"] and target.read_bytes() == b"older"


def test_the_input_is_kept_unless_asked(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    files.save(weights_model(), path)
    link = tmp_path / "link.onnx"
    link.symlink_to(path)
    for target in (path, link):
        with pytest.raises(InputError, match="is the input itself"):
            files.save(weights_model(8), target, source=path)
    assert weights_of(path).shape == (400, 4)
    files.save(weights_model(8), path, source=path, overwrite_input=True)
    assert weights_of(path).shape == (8, 4)


def test_weights_that_are_still_read_are_not_replaced(tmp_path: Path) -> None:
    ir.save(ir.from_proto(weights_model()), tmp_path / "in.onnx", external_data="out.onnx.data")
    before = (tmp_path / "out.onnx.data").read_bytes()
    with pytest.raises(InputError, match="holds weights of the input"):
        files.save(ir.load(tmp_path / "in.onnx"), tmp_path / "out.onnx", external_data_from=0)
    assert (tmp_path / "out.onnx.data").read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["in.onnx", "out.onnx.data"]


def test_a_model_with_external_data_can_replace_itself(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    files.save(weights_model(), path, external_data_from=0)
    files.save(ir.load(path), path, source=path, overwrite_input=True, external_data_from=0)
    np.testing.assert_array_equal(weights_of(path), np.arange(1600, dtype=np.float32).reshape(400, 4))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none/out.onnx", "the folder .*none does not exist"),
        ("folder.onnx", "is a folder"),
        ("out.pt2", "written as a .onnx file"),
        ("out", "written as a .onnx file"),
    ],
)
def test_where_nothing_can_be_written(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "folder.onnx").mkdir()
    with pytest.raises(InputError, match=message):
        files.save(toy_decoder(), tmp_path / name)
    assert os.listdir(tmp_path) == ["folder.onnx"]


def test_text(tmp_path: Path) -> None:
    files.save_text("später\n", tmp_path / "a.txt")
    assert (tmp_path / "a.txt").read_text(encoding="utf-8") == "später\n"
    with pytest.raises(InputError, match="does not exist"):
        files.save_text("x", tmp_path / "none" / "a.txt")
    assert os.listdir(tmp_path) == ["a.txt"]

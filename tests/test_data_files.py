"""Data files of a model kept as they are: copied or linked, not read, and never left beside another model."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from test_files import external, weights_model

import graphrewrite as gr
from graphrewrite import data_files, files, models
from graphrewrite.errors import InputError
from graphrewrite.external_data import external_tensors


def stored(folder: Path, size: int = 0) -> ir.Model:
    """weights_model read from in.onnx, its weights in in.data beside it; with `size` that is all holes, and so long."""
    folder.mkdir(exist_ok=True)
    ir.save(ir.from_proto(weights_model()), folder / "in.onnx", external_data="in.data")
    if size:
        with open(folder / "in.data", "r+b") as file:
            file.truncate(size)
    model = models.load(folder / "in.onnx")
    assert isinstance(model, ir.Model)
    return model


@pytest.mark.parametrize("how", ["copy", "link"])
@pytest.mark.parametrize("same_folder", [True, False])
def test_data_files_are_kept_as_they_are(how: Any, same_folder: bool, tmp_path: Path) -> None:
    source, target = tmp_path / "in", tmp_path / ("in" if same_folder else "out")
    target.mkdir(exist_ok=True)
    model = stored(source)
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    for _ in range(2):  # a second time over the first result
        files.save(model, target / "out.onnx", source=source / "in.onnx", weights=how)
    assert {path.name: path.read_bytes() for path in source.iterdir() if path.name in before} == before
    names = {"out.onnx", "out.onnx.data"} | (set(before) if same_folder else set())
    assert {path.name for path in target.iterdir()} == names
    data = target / "out.onnx.data"
    assert data.samefile(source / "in.data") is (how == "link")
    assert data.read_bytes() == before["in.data"]
    session = onnxruntime.InferenceSession(target / "out.onnx")
    (result,) = session.run(None, {"a": np.ones((1, 400), np.float32)})
    np.testing.assert_allclose(result[0], np.arange(1600.0).reshape(400, 4).sum(0))  # below 2^24: exact in float32
    (tensor,) = external_tensors(model)
    assert os.fspath(tensor.location) == "in.data"  # the caller's model still reads its own file


def test_weights_in_branches_and_functions_move_with_their_file(tmp_path: Path) -> None:
    for place in ("graph", "subgraph", "function"):
        source, target = tmp_path / place, tmp_path / f"{place}-out"
        source.mkdir(), target.mkdir()
        files.save(models.load(external(source, place)), target / "out.onnx", weights="copy")
        (location,) = {os.fspath(tensor.location) for tensor in external_tensors(ir.load(target / "out.onnx"))}
        assert location == "out.onnx.data"


def test_weights_in_several_files(tmp_path: Path) -> None:
    model = ir.from_proto(weights_model())
    for name in ("first", "second"):
        (tmp_path / name).write_bytes(name[:1].encode() * 16)
        tensor = ir.ExternalTensor(name, 0, 16, ir.DataType.FLOAT, shape=ir.Shape([4]), name=name, base_dir=tmp_path)
        type_ = ir.TensorType(ir.DataType.FLOAT)
        model.graph.register_initializer(ir.Value(name=name, type=type_, shape=ir.Shape([4]), const_value=tensor))
    (tmp_path / "out").mkdir()
    files.save(model, tmp_path / "out" / "o.onnx", weights="copy")
    found = {path.name: path.read_bytes()[:1] for path in (tmp_path / "out").glob("*.data*")}
    assert found == {"o.onnx.data": b"f", "o.onnx.data.1": b"s"}
    tensors = {
        tensor.name: os.fspath(tensor.location) for tensor in external_tensors(ir.load(tmp_path / "out" / "o.onnx"))
    }
    assert tensors == {"first": "o.onnx.data", "second": "o.onnx.data.1"}


@pytest.mark.parametrize("how", ["copy", "link"])
def test_nothing_is_read_of_weights_that_are_kept_as_they_are(
    how: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a copy fill the holes: 64 GB are more than most disks have to spare."""
    model = stored(tmp_path / "in", size=64 << 30)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the weights are read")

    for name in ("numpy", "tobytes", "tofile", "_load"):
        monkeypatch.setattr(ir.ExternalTensor, name, refuse)
    result = gr.rewrite(model)
    files.save(result.model, tmp_path / "out.onnx", weights=how)
    status = (tmp_path / "out.onnx.data").stat()
    assert status.st_size == 64 << 30 and status.st_blocks * 512 < 1 << 20


def test_holes_and_data_are_copied_to_the_byte(tmp_path: Path) -> None:
    source = tmp_path / "source"
    with open(source, "wb") as file:
        for offset in (0, 1 << 20, (5 << 20) + 7):
            file.seek(offset)
            file.write(b"data")
        file.truncate(9 << 20)
    data_files.copy_file(str(source), tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == source.read_bytes()


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.EXDEV, r"in\.data cannot be linked into .*; copy the weights instead"),
        (errno.ENOSPC, r"out\.onnx cannot be written: No space left"),
    ],
)
def test_a_link_that_cannot_be_made(number: int, message: str, tmp_path: Path, monkeypatch: Any) -> None:
    model = stored(tmp_path / "in")
    (tmp_path / "out.onnx").write_bytes(b"older")

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", fail)
    with pytest.raises(InputError, match=message):
        files.save(model, tmp_path / "out.onnx", weights="link")
    assert (tmp_path / "out.onnx").read_bytes() == b"older"
    assert sorted(os.listdir(tmp_path)) == ["in", "out.onnx"]


@pytest.mark.parametrize("how", ["gather", "copy", "link"])
def test_no_model_is_left_beside_weights_of_another(how: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system stops between the renaming of the weights and that of the model."""
    model = stored(tmp_path / "in")
    files.save(model, tmp_path / "out.onnx", weights=how, external_data_from=0)
    plain = os.replace

    def fail(old: Any, new: Any) -> None:
        if Path(new) == tmp_path / "out.onnx":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        plain(old, new)

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(InputError, match="cannot be written"):
        files.save(model, tmp_path / "out.onnx", weights=how, external_data_from=0)
    assert sorted(os.listdir(tmp_path)) == ["in", "out.onnx.data"]


@pytest.mark.parametrize("how", ["copy", "link"])
def test_data_files_that_are_still_read_are_not_replaced(how: Any, tmp_path: Path) -> None:
    ir.save(ir.from_proto(weights_model()), tmp_path / "in.onnx", external_data="out.onnx.data")
    with pytest.raises(InputError, match="holds weights of the input"):
        files.save(models.load(tmp_path / "in.onnx"), tmp_path / "out.onnx", weights=how)
    assert sorted(os.listdir(tmp_path)) == ["in.onnx", "out.onnx.data"]


def test_what_becomes_of_weights_is_one_of_three(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="weights: 'move' is none of gather, copy, link"):
        files.save(weights_model(), tmp_path / "out.onnx", weights="move")  # type: ignore[arg-type]

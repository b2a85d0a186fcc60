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

from graphrewrite import errors, files, models
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
        ("pipe.onnx", "exists and is not a regular file"),
        ("link.onnx", "is a symbolic link to file.onnx"),
        ("dangling.onnx", "is a symbolic link to none"),
        ("loop.onnx", "is a symbolic link to loop.onnx"),
        ("linked.onnx", r"linked\.onnx\.data is a symbolic link to file"),
        ("n" * 300 + ".onnx", "cannot be written: File name too long"),
        ("nul\0.onnx", "cannot be written: embedded null"),
    ],
)
def test_where_nothing_can_be_written(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "folder.onnx").mkdir()
    (tmp_path / "file.onnx").touch()
    os.mkfifo(tmp_path / "pipe.onnx")
    for link, target in {
        "link.onnx": "file.onnx",
        "dangling.onnx": "none",
        "loop.onnx": "loop.onnx",
        "linked.onnx.data": "file.onnx",
    }.items():
        (tmp_path / link).symlink_to(target)
    before = {entry.name: entry.lstat() for entry in tmp_path.iterdir()}
    with pytest.raises(InputError, match=message):
        files.save(toy_decoder(), tmp_path / name, external_data_from=0)
    assert {entry.name: entry.lstat() for entry in tmp_path.iterdir()} == before


def test_a_name_of_the_longest_kind(tmp_path: Path) -> None:
    name = "n" * (255 - len(".onnx")) + ".onnx"
    files.save(toy_decoder(), tmp_path / name)
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize(
    ("model", "path", "message"),
    [
        (3, "out.onnx", "a int is not a model to save"),
        ("in.onnx", "out.onnx", "a str is not a model to save"),
        (toy_decoder(), 3, "3 is not a path"),
        (toy_decoder(), None, "None is not a path"),
        (toy_decoder(), b"out.onnx", "is not a path"),
    ],
)
def test_bad_arguments(model: Any, path: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        files.save(model, path)


def external(folder: Path, place: str = "graph", **changes: str) -> Path:
    """weights_model in `folder`/in.onnx, its weights in in.data beside it, and then with other external data entries.

    place: "graph", or the body of an If or a function, where a Constant has the weights.
    """
    model = weights_model()
    graph = model.graph
    tensor = graph.initializer.pop()
    onnx.external_data_helper.set_external_data(tensor, "in.data", 0, len(tensor.raw_data))
    (folder / "in.data").write_bytes(tensor.raw_data)
    tensor.ClearField("raw_data")
    for entry in tensor.external_data:
        entry.value = changes.get(entry.key, entry.value)
    constant = helper.make_node("Constant", [], ["w"])
    constant.attribute.add(name="value", type=onnx.AttributeProto.TENSOR).t.CopyFrom(tensor)
    if place == "graph":
        graph.initializer.append(tensor)
    elif place == "subgraph":
        body = helper.make_graph([constant], "body", [], [helper.make_tensor_value_info("w", TensorProto.FLOAT, None)])
        graph.initializer.append(numpy_helper.from_array(np.array(True), "yes"))
        graph.node.insert(0, helper.make_node("If", ["yes"], ["w"], then_branch=body, else_branch=body))
    else:
        model.functions.append(helper.make_function("own", "f", [], ["w"], [constant], model.opset_import))
        model.opset_import.append(helper.make_opsetid("own", 1))
        graph.node.insert(0, helper.make_node("f", [], ["w"], domain="own"))
    (folder / "in.onnx").write_bytes(model.SerializeToString())
    return folder / "in.onnx"


@pytest.mark.parametrize("place", ["graph", "subgraph", "function"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({"location": "none.data"}, "'none.data' cannot be read: No such file"),
        ({"location": ""}, "the location is empty"),
        ({"location": "short.data"}, "ends at byte 6400, the file at 10"),
        ({"offset": "4096"}, "ends at byte 10496, the file at 6400"),
        ({"offset": "-1"}, "must be non-negative, got -1"),
        ({"length": "12"}, "a length of 12 bytes, the tensor has 6400"),
        ({"location": "../outside.data"}, "outside the model's folder"),
        ({"location": "/etc/passwd"}, "an absolute path"),
        ({"location": "leaving.data"}, "outside the model's folder"),
        ({"location": "staying.data"}, None),
        ({"location": "loop.data"}, "'loop.data' cannot be read"),
        ({"location": "pipe.data"}, "not in a regular file"),
        ({"location": "."}, "not in a regular file"),
        ({"location": "n" * 300}, "cannot be read: File name too long"),
        ({"location": "nul\0"}, "cannot be read: .*null byte"),
    ],
)
@pytest.mark.parametrize("relative", [False, True])
def test_data_files_are_checked_when_a_model_is_read(
    place: str, changes: dict[str, str], message: str | None, relative: bool, tmp_path: Path, monkeypatch: Any
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for path in (tmp_path / "outside.data", folder / "short.data"):
        path.write_bytes(bytes(10 if path.name == "short.data" else 6400))
    for link, target in {"leaving": "../outside.data", "staying": "in.data", "loop": "loop.data"}.items():
        (folder / f"{link}.data").symlink_to(target)
    os.mkfifo(folder / "pipe.data")
    path = external(folder, place, **changes)
    if relative:
        monkeypatch.chdir(folder)
        path = Path("in.onnx")
    if message is None:
        assert isinstance(models.load(path), ir.Model)
        return
    with pytest.raises(InputError, match=message) as caught:
        models.load(path)
    assert str(caught.value).startswith(f"{path}: ") and "'w'" in str(caught.value)


def test_data_that_goes_away_is_not_blamed_on_the_output(tmp_path: Path) -> None:
    model = models.load(external(tmp_path))
    (tmp_path / "in.data").unlink()
    with pytest.raises(InputError, match=r"the model: the data of 'w' in 'in.data' cannot be read: No such file"):
        files.save(model, tmp_path / "out.onnx")
    assert os.listdir(tmp_path) == ["in.onnx"]


def test_data_that_the_reader_refuses(tmp_path: Path) -> None:
    model = models.load(external(tmp_path))
    os.link(tmp_path / "in.data", tmp_path / "second.data")
    with pytest.raises(InputError, match=r"the model cannot be read: .*multiple hard links"):
        files.save(model, tmp_path / "out.onnx")
    assert not (tmp_path / "out.onnx").exists()


def test_the_reason_is_what_went_wrong_first_and_short(tmp_path: Path) -> None:
    model = weights_model()
    model.graph.initializer[0].data_type = 99
    onnx.save(model, tmp_path / "in.onnx")
    with pytest.raises(InputError, match=r"not an ONNX model \(ValueError: 99 is not a valid DataType\)"):
        models.load(tmp_path / "in.onnx")
    assert len(errors.reason(ValueError("x" * 1000 + "\ny"))) == len("ValueError: ") + 200


def test_text(tmp_path: Path) -> None:
    files.save_text("später\n", tmp_path / "a.txt")
    assert (tmp_path / "a.txt").read_text(encoding="utf-8") == "später\n"
    with pytest.raises(InputError, match="does not exist"):
        files.save_text("x", tmp_path / "none" / "a.txt")
    assert os.listdir(tmp_path) == ["a.txt"]

"""Sessions: every kind of model, the library, and one clear sentence for each thing that can be wrong."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from decoder_models import VOCABULARY, toy_decoder
from onnx import TensorProto, helper

from graphrewrite import sessions
from graphrewrite.errors import InputError, LibraryError


def run_toy(session: onnxruntime.InferenceSession) -> tuple[int, ...]:
    feeds = {"tokens": np.array([[1, 2]]), "position": np.array([0]), "past_rows": np.zeros((1, 8, 4), np.float32)}
    shape: tuple[int, ...] = session.run(["logits"], feeds)[0].shape
    return shape


def as_path(model: onnx.ModelProto, folder: Path) -> Path:
    onnx.save(model, folder / "toy.onnx")
    return folder / "toy.onnx"


def as_external(model: onnx.ModelProto, folder: Path) -> ir.Model:
    ir.save(ir.from_proto(model), folder / "toy.onnx", external_data="toy.data", size_threshold_bytes=0)
    return ir.load(folder / "toy.onnx")


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(lambda model, folder: model, id="ModelProto"),
        pytest.param(lambda model, folder: ir.from_proto(model), id="onnx_ir.Model"),
        pytest.param(as_external, id="onnx_ir.Model with external data"),
        pytest.param(as_path, id="path"),
        pytest.param(lambda model, folder: str(as_path(model, folder)), id="text path"),
    ],
)
@pytest.mark.parametrize("largest_in_memory", [64 << 20, 0], ids=["as bytes", "through a file"])
def test_every_kind_of_model_runs(
    form: Any, largest_in_memory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "_LARGEST_IN_MEMORY", largest_in_memory)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    session = sessions.session(form(toy_decoder(), tmp_path), threads=1, use_library=False)
    assert run_toy(session) == (1, 1, VOCABULARY)
    assert "graphrewrite.caches" in session.get_modelmeta().custom_metadata_map
    assert list(scratch.iterdir()) == []


def test_a_model_given_in_memory_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_LARGEST_IN_MEMORY", 0)
    proto, model = toy_decoder(), ir.from_proto(toy_decoder())
    before = proto.SerializeToString(deterministic=True)
    sessions.session(proto, use_library=False)
    sessions.session(model, use_library=False)
    assert proto.SerializeToString(deterministic=True) == before
    assert not any(isinstance(value.const_value, ir.ExternalTensor) for value in model.graph.initializers.values())


def write(content: bytes) -> Any:
    def make(folder: Path) -> Path:
        (folder / "model.onnx").write_bytes(content)
        return folder / "model.onnx"

    return make


def without_data(folder: Path) -> ir.Model:
    model = as_external(toy_decoder(), folder)
    (folder / "toy.data").unlink()
    return model


def unknown_operator(_: Path) -> onnx.ModelProto:
    graph = helper.make_graph(
        [helper.make_node("CustomSdpa", ["a"], ["b"], domain="graphrewrite")],
        "unknown",
        [helper.make_tensor_value_info("a", TensorProto.FLOAT, [2])],
        [helper.make_tensor_value_info("b", TensorProto.FLOAT, [2])],
    )
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid("graphrewrite", 1)], ir_version=10
    )


def from_the_future(_: Path) -> onnx.ModelProto:
    model = toy_decoder()
    model.ir_version = 99
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        pytest.param(lambda folder: folder / "none.onnx", "none.onnx: no such file", id="missing"),
        pytest.param(lambda folder: folder, "not a file", id="folder"),
        pytest.param(lambda folder: folder / ("n" * 300), "File name too long", id="name too long"),
        pytest.param(without_data, "'toy.data' cannot be read: No such file", id="without its data"),
        pytest.param(write(b""), "is not an ONNX model", id="empty"),
        pytest.param(write(np.random.default_rng(0).bytes(4096)), "is not an ONNX model", id="random bytes"),
        pytest.param(write(toy_decoder().SerializeToString()[:-40]), "is not an ONNX model", id="truncated"),
        pytest.param(lambda _: 3, "a int is not an ONNX model", id="a number"),
        pytest.param(lambda _: onnx.ModelProto(), "is not an ONNX model", id="a model without a graph"),
        pytest.param(unknown_operator, "without standard-operator bodies.*use_library=True", id="no function body"),
        pytest.param(from_the_future, "cannot run the model: .*IR version: 99", id="newer than the runtime"),
    ],
)
def test_what_is_no_model_is_an_input_error_of_one_line(
    model: Any, message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InputError, match=message) as caught:
        sessions.session(model(tmp_path), use_library=False)
    assert "\n" not in str(caught.value)
    assert "/onnxruntime_src" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_an_unknown_provider_is_an_error_and_not_replaced(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.warns(UserWarning, match="is not in available"), pytest.raises(InputError, match="Unknown Provider"):
        sessions.session(toy_decoder(), use_library=False, providers=["AbacusExecutionProvider"])
    assert capfd.readouterr().out == ""


def test_an_operator_with_a_bad_attribute_says_so_once(capfd: pytest.CaptureFixture[str]) -> None:
    shapes = {"query": [1, 4, 2, 8], "key_cache": [1, 4, 2, 8], "value_cache": [1, 4, 2, 8]}
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    inputs.append(helper.make_tensor_value_info("start_pos", TensorProto.INT64, []))
    names = [value.name for value in inputs]
    node = helper.make_node("CustomSdpa", names, ["output"], domain="graphrewrite", layout="odd")
    output = helper.make_tensor_value_info("output", TensorProto.FLOAT, shapes["query"])
    graph = helper.make_graph([node], "odd", inputs, [output])
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("graphrewrite", 1)]
    with pytest.raises(InputError, match='CustomSdpa: layout "odd"'):
        sessions.session(helper.make_model(graph, opset_imports=opsets, ir_version=10))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("threads", [0, -1, 1.5, True, "2", 1025, 1 << 70])
def test_threads_must_be_a_number_that_a_machine_can_start(threads: Any) -> None:
    with pytest.raises(InputError, match="threads is"):
        sessions.session(toy_decoder(), threads=threads, use_library=False)


def test_settings_apply_to_own_options_only() -> None:
    ours = sessions.session(toy_decoder(), threads=1, use_library=False).get_session_options()
    assert ours.get_session_config_entry("session.disable_quant_qdq") == "1"
    assert ours.intra_op_num_threads == 1
    given = onnxruntime.SessionOptions()
    theirs = sessions.session(toy_decoder(), session_options=given, use_library=False).get_session_options()
    with pytest.raises(RuntimeError):
        theirs.get_session_config_entry("session.disable_quant_qdq")
    assert theirs.intra_op_num_threads == 0


def test_library_is_registered_and_loads() -> None:
    assert sessions.ops_library_path().is_file()
    assert run_toy(sessions.session(toy_decoder())) == (1, 1, VOCABULARY)


def test_public_functions_are_not_hidden_by_modules_of_their_name() -> None:
    program = (
        "import graphrewrite as gr\n"
        "gr.Decoder, gr.Verification\n"
        "import graphrewrite.cli, graphrewrite.doctor\n"
        "assert callable(gr.session) and callable(gr.verify) and callable(gr.rewrite), (gr.session, gr.verify)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_library_that_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "libgraphrewrite_ops.so"
    path.write_bytes(b"no library")
    monkeypatch.setattr(sessions, "library_path", lambda: path)
    with pytest.raises(LibraryError, match="does not load") as caught:
        sessions.session(toy_decoder())
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_an_old_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "__version__", "1.17.3")
    with pytest.raises(LibraryError, match=r"1\.17\.3 is too old .* 1\.18 or newer"):
        sessions.session(toy_decoder())


def test_an_instruction_set_this_machine_does_not_know() -> None:
    # In a process of its own: the library reads the variable once.
    program = (
        "import graphrewrite.sessions as s, onnxruntime\n"
        "from graphrewrite.errors import LibraryError\n"
        "try: s.register_library(onnxruntime.SessionOptions())\n"
        "except LibraryError as error: print(error)\n"
    )
    environment = {**os.environ, "GRAPHREWRITE_ISA": "abacus"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert "GRAPHREWRITE_ISA" in done.stdout and "abacus" in done.stdout and done.stdout.count("\n") == 1

"""onnxruntime sessions that have the kernel library registered.

Settings used when the caller passes no session options of their own:

* ``session.disable_quant_qdq=1``. onnxruntime 1.32 moves a scalar-scale int8 ``DequantizeLinear`` through ``Transpose``
  into ``MatMul`` and then either fails to load or computes something else, so an unfused model with a quantized cache
  is only right with these rewrites off. Its price: a model whose *weights* are in QDQ form runs in float. Such a model
  is better served by session options of one's own, which are used as they are.
* ``log_severity_level=4`` (fatal only): an error is raised as an exception and not printed a second time. With
  ``GRAPHREWRITE_DEBUG=1`` onnxruntime's own level is kept.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import onnxruntime

from graphrewrite.arguments import whole_number
from graphrewrite.custom_ops import library_path
from graphrewrite.errors import InputError, LibraryError
from graphrewrite.external_data import check_external_data
from graphrewrite.files import initializer_tensors
from graphrewrite.models import check_is_file

OLDEST_RUNTIME = (1, 18)
"""The first onnxruntime whose C interface has what the library uses."""

# A model in memory is handed over as bytes up to this size. Beyond it goes through a file with external data, which
# onnxruntime maps instead of keeping a second copy, and which has no 2 GB limit as a protobuf message has.
_LARGEST_IN_MEMORY = 64 << 20

_MOST_THREADS = 1024  # onnxruntime starts them all, and takes the process down when the system has no more

_SOURCE_POSITION = re.compile(r"/\S+\.(?:cc|h|cpp):\d+ .*?\) (?:const )?")

OnnxModel = str | os.PathLike[str] | onnx.ModelProto | ir.Model


def ops_library_path() -> Path:
    """Returns the path of the kernel library, for `SessionOptions.register_custom_ops_library` or any other binding.

    Raises:
        LibraryError: the library is not installed.
    """
    return library_path()


def session(
    model: OnnxModel,
    threads: int | None = None,
    *,
    use_library: bool = True,
    session_options: onnxruntime.SessionOptions | None = None,
    providers: Sequence[str | tuple[str, dict[str, Any]]] | None = None,
) -> onnxruntime.InferenceSession:
    """Returns an onnxruntime session for a model, with the kernel library registered.

    Args:
        model: an ONNX file, or a model in memory of any size.
        threads: size of the session's thread pool, 1 to 1024; None leaves it to onnxruntime.
        use_library: False runs the fused operators from their standard-operator bodies in the model instead.
        session_options: used as they are, apart from `threads` and the library; None takes this module's settings.
            Register the library only once in one options object: onnxruntime refuses a second time.
        providers: execution providers, as for `InferenceSession`; None takes the CPU.

    Raises:
        InputError: no such file, not an ONNX model, one this onnxruntime cannot run, or a bad argument.
        LibraryError: the library is missing, does not load (`GRAPHREWRITE_ISA` names an instruction set that this
            machine lacks, say), or onnxruntime is older than 1.18.
    """
    options = default_session_options() if session_options is None else session_options
    if threads is not None:
        options.intra_op_num_threads = whole_number("threads", threads, 1, _MOST_THREADS)
    if use_library:
        register_library(options)
    source, folder = _source(model)
    try:
        created = onnxruntime.InferenceSession(
            source, options, providers=list(providers or ["CPUExecutionProvider"]), enable_fallback=0
        )
    except Exception as error:  # onnxruntime's exceptions have no common base but Exception
        raise InputError(_load_message(model, error, use_library)) from error
    finally:
        # What is mapped stays mapped where the system lets an open file be removed; elsewhere it goes with the session.
        if folder is not None and os.name != "nt":
            shutil.rmtree(folder, ignore_errors=True)
    if folder is not None and os.name == "nt":
        weakref.finalize(created, shutil.rmtree, folder, ignore_errors=True)
    return created


def default_session_options() -> onnxruntime.SessionOptions:
    """Returns the session options this module uses when it is given none. See the module's text."""
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    if os.environ.get("GRAPHREWRITE_DEBUG") != "1":
        options.log_severity_level = 4
    return options


def register_library(options: onnxruntime.SessionOptions) -> None:
    """Registers the kernel library in session options.

    Raises:
        LibraryError: as for `session`.
    """
    version = onnxruntime.__version__
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_RUNTIME:
        oldest = ".".join(map(str, OLDEST_RUNTIME))
        raise LibraryError(
            f"onnxruntime {version} is too old for the kernel library, which needs {oldest} or newer; "
            "upgrade onnxruntime, or pass use_library=False to run the model from standard operators"
        )
    path = library_path()
    try:
        options.register_custom_ops_library(str(path))
    except Exception as error:
        isa = os.environ.get("GRAPHREWRITE_ISA")
        hint = f" (GRAPHREWRITE_ISA is set to {isa!r}; unset it to use what this machine has)" if isa else ""
        raise LibraryError(f"the kernel library {path} does not load: {runtime_message(error)}{hint}") from error


def runtime_message(error: BaseException) -> str:
    """Returns the sentence in an onnxruntime exception, in one line and without its error class and source position."""
    text = " ".join(str(error).split())
    if text.startswith("[ONNXRuntimeError]"):
        text = text.split(" : ", 3)[-1]
    marker = "Status Message: "
    if marker in text:
        text = text[text.index(marker) + len(marker) :]
    if _SOURCE_POSITION.match(text):
        # A failed check of the runtime itself: file, line, function and condition come before the message.
        text = text.split(" was false. ", 1)[-1]
        text = _SOURCE_POSITION.sub("", text)
    return text


def _source(model: OnnxModel) -> tuple[str | bytes, Path | None]:
    """Returns what InferenceSession takes, and the folder to remove afterwards if one was written."""
    if isinstance(model, (str, os.PathLike)):
        path = Path(model)
        check_is_file(path)
        return str(path), None
    if isinstance(model, onnx.ModelProto):
        if _initializer_bytes(model) <= _LARGEST_IN_MEMORY:
            return model.SerializeToString(), None
        return _write(ir.from_proto(model))
    if isinstance(model, ir.Model):
        tensors = list(initializer_tensors(model))
        external = any(isinstance(tensor, ir.ExternalTensor) for tensor in tensors)
        if not external and sum(tensor.nbytes for tensor in tensors) <= _LARGEST_IN_MEMORY:
            return ir.to_proto(model).SerializeToString(), None
        check_external_data(model, "the model")
        return _write(model)
    raise InputError(
        f"a {type(model).__name__} is not an ONNX model; give a path, an onnx.ModelProto or an onnx_ir.Model "
        "(export a torch.export.ExportedProgram with gr.export_onnx first)"
    )


def _write(model: ir.Model) -> tuple[str, Path]:
    folder = Path(tempfile.mkdtemp(prefix="graphrewrite-"))
    try:
        path = folder / "model.onnx"
        ir.save(model, path, external_data="model.onnx.data")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return str(path), folder


def _initializer_bytes(model: onnx.ModelProto) -> int:
    # From the dimensions: asking the message for its size serializes it.
    total = 0
    for tensor in model.graph.initializer:
        count = 1
        for dim in tensor.dims:
            count *= dim
        total += count * (ir.DataType(tensor.data_type).bitwidth if tensor.data_type != ir.DataType.STRING else 8) // 8
    return total


def _load_message(model: OnnxModel, error: Exception, use_library: bool) -> str:
    name = str(model) if isinstance(model, (str, os.PathLike)) else "the model"
    reason = runtime_message(error)
    kind = type(error).__name__
    if kind == "InvalidProtobuf" or "No graph was found" in reason:
        return f"{name} is not an ONNX model (empty, truncated or of another format)"
    if not use_library and "graphrewrite" in reason:
        return (
            f"{name} has fused operators without standard-operator bodies and the library is not in use: {reason}; "
            "run it with use_library=True"
        )
    return f"onnxruntime {onnxruntime.__version__} cannot run {name}: {reason}"

"""Writing files so that a reader never meets a half-written one: beside the target, then renamed over it.

Only a regular file is ever replaced. A symbolic link is refused and not followed: a model and the weights file beside
it would end up in two folders.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast, get_args

import onnx
import onnx_ir as ir

from graphrewrite.data_files import copy_file, data_names, link_file, with_data_names
from graphrewrite.errors import InputError
from graphrewrite.external_data import check_external_data, external_tensors
from graphrewrite.models import LoadedModel, is_exported_program

if TYPE_CHECKING:
    from torch.export import ExportedProgram

EXTERNAL_DATA_FROM = 128 << 20
"""Weights of this many bytes and more go to a second file, ``NAME.onnx.data``, which a runtime maps into memory."""

# Tensors of this many bytes and less stay in the model: shape inference needs the small ones (axes, shapes).
_INLINE_UP_TO = 1024


Weights = Literal["gather", "copy", "link"]

_LARGEST_MESSAGE = (1 << 31) - (1 << 20)  # bytes; protobuf's limit, and room for the nodes


def check_output(path: Path, source: Path | None = None, *, overwrite_input: bool = False) -> None:
    """Checks that a file can be written at `path`, before the work that makes its content.

    Args:
        path: the file to be written.
        source: the file the content is made from.
        overwrite_input: allows `path` to be `source`.

    Raises:
        InputError: the folder is missing or not writable, the name is one the system does not take, `path` is `source`,
            or `path` exists and is not a regular file: a folder, a symbolic link, a device, a named pipe.
    """
    folder = path.parent
    try:
        if not folder.is_dir():
            raise InputError(f"{path}: the folder {folder} does not exist; create it first")
        mode = _mode(path)
        same = source is not None and path.exists() and source.exists() and path.samefile(source)
        if same and not overwrite_input:
            raise InputError(f"{path} is the input itself; give another name for the output")
        if path.is_dir():
            raise InputError(f"{path} is a folder; give the name of a file in it")
        if mode is not None and stat.S_ISLNK(mode):
            raise InputError(f"{path} is a symbolic link to {os.readlink(path)}; give the name of a file, or remove it")
    except (OSError, ValueError, RuntimeError) as error:  # a name that is too long, a NUL in it, a loop of folders
        raise InputError(f"{path} cannot be written: {getattr(error, 'strerror', None) or error}") from error
    if mode is not None and not stat.S_ISREG(mode):
        raise InputError(f"{path} exists and is not a regular file; give another name for the output")
    if not os.access(folder, os.W_OK):
        raise InputError(f"{path}: no permission to write in {folder}")


def _mode(path: Path) -> int | None:
    """Returns the file mode of what `path` itself is, links not followed; None where there is nothing."""
    try:
        return path.lstat().st_mode
    except FileNotFoundError:
        return None


def save(
    model: LoadedModel,
    path: str | os.PathLike[str],
    *,
    source: str | os.PathLike[str] | None = None,
    overwrite_input: bool = False,
    external_data_from: int = EXTERNAL_DATA_FROM,
    weights: Weights = "gather",
) -> None:
    """Writes a model whole or not at all, and never over a file that it reads from.

    Args:
        model: an ONNX model for a ``.onnx`` file, an ExportedProgram for a ``.pt2`` file. It is left as it was.
        path: the file to write. An older file there is replaced.
        source: the file the model was read from; it is not overwritten unless `overwrite_input`.
        external_data_from: total bytes of an ONNX model's weights from which they go to ``NAME.data`` beside it.
        weights: what becomes of data files that an ONNX model reads from.
            "gather" reads the weights that the model has and writes them anew, into one file.
            "copy" copies the files as they are, to ``NAME.data``, ``NAME.data.1`` and so on, without a look at them: by
            reference where the file system can, and without their holes.
            "link" gives the files these names as second ones (hard links), which takes no time and no space.
            onnxruntime reads such files; onnx and onnx_ir refuse to, of the new model and of the old one alike, as
            long as the file has two names.

    Raises:
        InputError: `model` is not a model, the suffix does not fit it, as `check_output`, the system refuses the file,
            weights in files cannot be read or linked, or the weights file would replace one that the model still reads
            from.
    """
    if weights not in get_args(Weights):
        raise InputError(f"weights: {weights!r} is none of {', '.join(get_args(Weights))}")
    if not isinstance(model, (onnx.ModelProto, ir.Model)) and not is_exported_program(model):
        raise InputError(
            f"a {type(model).__name__} is not a model to save: give an onnx.ModelProto, an onnx_ir.Model or a "
            "torch.export.ExportedProgram"
        )
    target = _as_path(path)
    program = is_exported_program(model)
    suffix = ".pt2" if program else ".onnx"
    if target.suffix != suffix:
        raise InputError(f"{target}: the model is written as a {suffix} file; give a name that ends so")
    check_output(target, None if source is None else _as_path(source), overwrite_input=overwrite_input)
    if program:
        import torch

        with _staging(target) as folder:
            torch.export.save(cast("ExportedProgram", model), folder / target.name)
            os.replace(folder / target.name, target)
    else:
        onnx_model = ir.from_proto(model) if isinstance(model, onnx.ModelProto) else cast("ir.Model", model)
        check_external_data(onnx_model, "the model")
        if weights != "gather" and next(external_tensors(onnx_model), None) is not None:
            _save_with_files(onnx_model, target, overwrite_input, link=weights == "link")
        else:
            _save_gathered(onnx_model, target, overwrite_input, external_data_from)


def _as_path(path: str | os.PathLike[str]) -> Path:
    try:
        return Path(path)
    except TypeError:
        raise InputError(f"{path!r} is not a path; give a str or a pathlib.Path") from None


def _save_gathered(model: ir.Model, target: Path, overwrite_input: bool, external_data_from: int) -> None:
    tensors = list(initializer_tensors(model))
    separate = sum(tensor.nbytes for tensor in tensors) >= external_data_from
    data = target.with_name(f"{target.name}.data")
    read = {tensor.path for tensor in external_tensors(model)}
    if separate:
        _check_data(data, read, overwrite_input)
    with _staging(target) as folder:
        # Without `external_data`, weights that lie in a file now would still be looked for there. Where nothing goes
        # to a file its name is short: onnx_ir makes a folder of a longer name for it.
        threshold, data_name = (_INLINE_UP_TO, data.name) if separate else (sys.maxsize, "data")
        try:
            ir.save(model, folder / target.name, external_data=data_name, size_threshold_bytes=threshold)
        except (OSError, ValueError) as error:
            # onnx_ir maps the files only now, and refuses one of several hard links with a ValueError.
            if isinstance(error, OSError) and error.filename not in read:
                raise
            raise InputError(f"{target} is not written, the model cannot be read: {error}") from error
        _publish(folder, target, [data] if separate else [])


def _save_with_files(model: ir.Model, target: Path, overwrite_input: bool, *, link: bool) -> None:
    """Writes a model with the data files it reads from as they are."""
    names = data_names(model, target)
    data = [target.with_name(name) for name in names.values()]
    for path in data:
        _check_data(path, names, overwrite_input)
    inside = sum(t.nbytes for t in initializer_tensors(model) if not isinstance(t, ir.ExternalTensor))
    if inside > _LARGEST_MESSAGE:
        raise InputError(f"{inside} bytes of weights are in memory, more than a model file holds; gather the weights")
    with _staging(target) as folder:
        (folder / target.name).write_bytes(with_data_names(model, names).SerializeToString())
        for source, name in names.items():
            (link_file if link else copy_file)(source, folder / name)
        _publish(folder, target, data)


def _check_data(data: Path, read: Collection[str], overwrite_input: bool) -> None:
    if not overwrite_input and data.resolve() in {Path(path).resolve() for path in read}:
        raise InputError(f"{data} holds weights of the input; give another name for the output")
    check_output(data)


def _publish(folder: Path, target: Path, data: Sequence[Path]) -> None:
    """Moves a model and its data files to where they belong, the model last.

    An older model at the target goes first when its data files are replaced: whatever happens in between, no model ever
    stands beside weights of another.
    """
    if any(path.exists() for path in data):
        with contextlib.suppress(FileNotFoundError):
            os.replace(target, folder / "older")
    for path in data:
        os.replace(folder / path.name, path)
    os.replace(folder / target.name, target)


def initializer_tensors(model: ir.Model) -> Iterator[ir.TensorProtocol]:
    """Yields the weights of a model, those in the bodies of If and Loop too."""
    for graph in model.graphs():
        for value in graph.initializers.values():
            if value.const_value is not None:
                yield value.const_value


def save_text(text: str, path: str | os.PathLike[str]) -> None:
    """Writes a text file in UTF-8, whole or not at all.

    Raises:
        InputError: as `check_output`, or the system refuses the file.
    """
    target = _as_path(path)
    check_output(target)
    with _staging(target) as folder:
        (folder / target.name).write_text(text, encoding="utf-8")
        os.replace(folder / target.name, target)


@contextmanager
def _staging(target: Path) -> Iterator[Path]:
    """A folder beside the target, so that a rename stays within one file system; gone afterwards, whatever happens."""
    folder: Path | None = None
    try:
        # A short name of its own: the target's may be as long as the system allows.
        folder = Path(tempfile.mkdtemp(prefix=".gr-", dir=target.parent))
        yield folder
    except OSError as error:
        raise InputError(f"{target} cannot be written: {error.strerror or error}") from error
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

"""Weights that lie in files beside a model: where they may be, and whether they are there.

A model names its data files itself, so a model from elsewhere could name any file of this machine. Data is read only
from regular files in the model's own folder, symbolic links followed. Nothing of the data is read to find out.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import onnx_ir as ir

from graphrewrite.errors import InputError


def external_tensors(model: ir.Model) -> Iterator[ir.ExternalTensor]:
    """Yields the tensors whose data is in a file: weights and attributes, in every graph, subgraph and function."""
    bodies: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    for body in bodies:
        graphs = [body, *body.subgraphs()]
        for graph in graphs:
            if isinstance(graph, ir.Graph):
                for value in graph.initializers.values():
                    if isinstance(value.const_value, ir.ExternalTensor):
                        yield value.const_value
        for node in body.all_nodes():
            for attribute in node.attributes.values():
                yield from _of_attribute(attribute)


def _of_attribute(attribute: ir.Attr) -> Iterator[ir.ExternalTensor]:
    if attribute.is_ref() or attribute.type not in (ir.AttributeType.TENSOR, ir.AttributeType.TENSORS):
        return
    for tensor in [attribute.value] if attribute.type == ir.AttributeType.TENSOR else attribute.value:
        if isinstance(tensor, ir.ExternalTensor):
            yield tensor


def check_external_data(model: ir.Model, name: str, folder: Path | None = None) -> None:
    """Checks that all data in files can be read, without reading it.

    Args:
        model: its tensors' `base_dir` says where their files are.
        name: what to call the model in an error.
        folder: the folder that the files must be in; None sets no bounds, for a model that was made in memory.

    Raises:
        InputError: a file is missing, outside `folder`, no regular file, or too short; or a tensor's length is wrong.
    """
    sizes: dict[str, int] = {}
    for tensor in external_tensors(model):
        where = f"{name}: the data of {tensor.name!r} in {os.fspath(tensor.location)!r}"
        if tensor.path not in sizes:
            sizes[tensor.path] = _file_size(tensor, folder, where)
        if tensor.dtype == ir.DataType.STRING:
            raise InputError(f"{where} is text, which cannot be in a data file")
        offset, length = tensor.offset or 0, tensor.length or tensor.nbytes
        if length != tensor.nbytes:
            raise InputError(f"{where} has a length of {length} bytes, the tensor has {tensor.nbytes}")
        if offset + length > sizes[tensor.path]:
            raise InputError(
                f"{where} ends at byte {offset + length}, the file at {sizes[tensor.path]}: it is cut short, or not "
                "the model's"
            )


def _file_size(tensor: ir.ExternalTensor, folder: Path | None, where: str) -> int:
    location = os.fspath(tensor.location)
    if not location:
        raise InputError(f"{where} has no file: the location is empty")
    try:
        if folder is not None:
            if os.path.isabs(location):
                raise InputError(f"{where} has an absolute path; data files must be in the model's folder")
            if not Path(tensor.path).resolve().is_relative_to(folder.resolve()):
                raise InputError(f"{where} is outside the model's folder; copy the file into it and name that one")
        status = os.stat(tensor.path)
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: a loop of symbolic links, before Python 3.13
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{where} cannot be read: {reason}") from error
    if not stat.S_ISREG(status.st_mode):
        raise InputError(f"{where} is not in a regular file")
    return status.st_size

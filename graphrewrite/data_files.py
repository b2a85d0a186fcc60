"""A model's data files as they are, linked or copied beside another model: no tensor is read.

The copies share storage with the source where the file system can do that, and leave holes where it has them.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import onnx
import onnx_ir as ir

from graphrewrite.errors import InputError
from graphrewrite.external_data import external_tensors

_LARGEST_CHUNK = 1 << 30


def data_names(model: ir.Model, target: Path) -> dict[str, str]:
    """Returns, by the path of each data file that a model reads from, the name it is given beside `target`."""
    paths = dict.fromkeys(os.fspath(tensor.path) for tensor in external_tensors(model))
    return {path: f"{target.name}.data{f'.{index}' if index else ''}" for index, path in enumerate(paths)}


def with_data_names(model: ir.Model, names: Mapping[str, str]) -> onnx.ModelProto:
    """Returns the model as a message whose tensors are in files of other names, by the paths they are in now.

    Raises:
        InputError: two files have one name, in two folders, and the message alone does not tell them apart.
    """
    renamed: dict[str, str] = {}
    for tensor in external_tensors(model):
        location, name = os.fspath(tensor.location), names[os.fspath(tensor.path)]
        if renamed.setdefault(location, name) != name:
            raise InputError(
                f"weights are in two files of the name {location}, in two folders; gather the weights instead"
            )
    message = ir.to_proto(model)
    for proto in _external_tensors(message):
        for entry in proto.external_data:
            if entry.key == "location":
                entry.value = renamed[entry.value]
    return message


def link_file(source: str, target: Path) -> None:
    """Gives a file a second name.

    Raises:
        InputError: the two are on different file systems, or on one without hard links.
    """
    try:
        os.link(os.path.realpath(source), target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EMLINK):
            raise
        raise InputError(
            f"{source} cannot be linked into {target.parent.parent} ({error.strerror}); copy the weights instead"
        ) from error


def copy_file(source: str, target: Path) -> None:
    """Copies a file, without its holes and by reference where the system can."""
    if not hasattr(os, "copy_file_range"):
        shutil.copyfile(source, target)
        return
    with open(source, "rb") as reader, open(target, "wb") as writer:
        size = os.fstat(reader.fileno()).st_size
        try:
            for start, end in _extents(reader.fileno(), size):
                while start < end:
                    count = min(end - start, _LARGEST_CHUNK)
                    copied = os.copy_file_range(reader.fileno(), writer.fileno(), count, start, start)
                    if not copied:
                        raise OSError(errno.EIO, "the file became shorter while it was copied")
                    start += copied
            writer.truncate(size)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            shutil.copyfile(source, target)  # a pair of file systems for which the system has no such copy


def _extents(file: int, size: int) -> Iterator[tuple[int, int]]:
    """Yields the start and the end of each part of a file that is no hole."""
    position = 0
    while position < size:
        try:
            start = os.lseek(file, position, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # a hole up to the end
                return
            raise
        position = os.lseek(file, start, os.SEEK_HOLE)
        yield start, position


def _external_tensors(message: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Yields the tensors of a model whose data is in files: weights and attributes, in graphs and functions."""
    graphs = [message.graph]
    nodes = [node for function in message.functions for node in function.node]
    while graphs or nodes:
        if graphs:
            graph = graphs.pop()
            yield from (tensor for tensor in graph.initializer if tensor.external_data)
            nodes.extend(graph.node)
            continue
        for attribute in nodes.pop().attribute:
            yield from (tensor for tensor in (attribute.t, *attribute.tensors) if tensor.external_data)
            if attribute.type == onnx.AttributeProto.GRAPH:
                graphs.append(attribute.g)
            graphs.extend(attribute.graphs)

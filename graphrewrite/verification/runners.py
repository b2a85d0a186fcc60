"""Programs of both kinds run step by step behind one interface, each with caches of its own carried along."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import onnx
import onnx_ir as ir

from graphrewrite import ort_tensors
from graphrewrite.cache_metadata import check_fill, read_caches
from graphrewrite.errors import InputError
from graphrewrite.external_data import external_tensors
from graphrewrite.files import initializer_tensors
from graphrewrite.ort_tensors import Array
from graphrewrite.sessions import OnnxModel, default_session_options, runtime_message, session

if TYPE_CHECKING:
    from torch.export import ExportedProgram


@dataclass(frozen=True)
class InputSpec:
    """An input that is fed at each step.

    Attributes:
        name: its name.
        dtype: numpy type; None for one that is not a tensor.
        shape: sizes; an open one is a text that names it.
        example: a value the model came with, None without one.
    """

    name: str
    dtype: np.dtype[Any] | None
    shape: tuple[int | str, ...]
    example: Any = None


@dataclass(frozen=True)
class CacheSpec:
    """Shape of a tensor that may be a cache, and the axis of its positions where that is known."""

    shape: tuple[int, ...]
    axis: int | None


@dataclass(frozen=True)
class StepResult:
    """What a step gave, in the program's order. Caches hold their contents after the step, sites what the values that
    are watched were, by their names."""

    outputs: dict[str, Array]
    caches: dict[str, Array]
    sites: dict[str, Array] = field(default_factory=dict)


class Runner(Protocol):
    """A program with its caches. `bounds` are the least and largest size of an open dimension, by its name."""

    inputs: tuple[InputSpec, ...]
    caches: tuple[CacheSpec, ...]
    bounds: Mapping[str, tuple[int, int]]
    vocabulary: int | None

    def weights(self) -> list[tuple[str, tuple[int, ...]]]:
        """Numpy type name and shape of every weight."""
        ...

    def step(self, values: list[Any]) -> StepResult:
        """Runs once, on values in the order of `inputs`, and keeps the caches for the next time."""
        ...


class OnnxRunner:
    """An ONNX model in onnxruntime, its caches as the metadata has them; without metadata every input is fed.

    watch: inner values of the main graph to be seen at each step. The model that runs is then a copy that has them as
    outputs too.
    """

    def __init__(
        self,
        model: OnnxModel,
        graph: ir.Model | onnx.ModelProto,
        threads: int | None = None,
        *,
        watch: Collection[str] = (),
    ) -> None:
        self._graph = graph
        self._session = watching_session(graph, watch) if watch else session(model, threads)
        self._watched = set(watch) - {value.name for value in _outputs_of(graph)}
        self._entries = read_caches(self._session.get_modelmeta().custom_metadata_map)
        inputs = {value.name: value for value in self._session.get_inputs()}
        outputs = self._session.get_outputs()
        missing = [e for e in self._entries if e.input not in inputs or e.output not in {o.name for o in outputs}]
        if missing:
            raise InputError(f"the metadata names the cache {missing[0].input!r}, which the model does not have")
        self._present: dict[str, Any] = {}
        specs = []
        for entry in self._entries:
            value = inputs[entry.input]
            shape = tuple(size if isinstance(size, int) else 1 for size in value.shape)
            specs.append(CacheSpec(shape, entry.axis))
            self._present[entry.input] = ort_tensors.empty(shape, _known_type(value))
            check_fill(entry, ort_tensors.view(self._present[entry.input]).dtype)
            ort_tensors.view(self._present[entry.input])[...] = entry.fill
        self._fed = [value for name, value in inputs.items() if name not in self._present]
        self._output_names = [value.name for value in outputs]
        self.inputs = tuple(InputSpec(v.name, _known_dtype(v), _open_shape(v.name, v.shape)) for v in self._fed)
        self.caches = tuple(specs)
        self.bounds: Mapping[str, tuple[int, int]] = {}
        hidden = {entry.output for entry in self._entries} | self._watched
        free = [value for value in outputs if value.name not in hidden]
        width = free[0].shape[-1] if free and free[0].shape else None
        self.vocabulary = width if isinstance(width, int) else None

    def weights(self) -> list[tuple[str, tuple[int, ...]]]:
        if isinstance(self._graph, onnx.ModelProto):
            found = [(ir.DataType(t.data_type), tuple(t.dims)) for t in self._graph.graph.initializer]
        else:
            found = [(t.dtype, tuple(t.shape.numpy())) for t in initializer_tensors(self._graph)]
        return [(dtype.numpy().name, shape) for dtype, shape in found]

    def step(self, values: list[Any]) -> StepResult:
        feeds = dict(self._present)
        for value, array in zip(self._fed, values, strict=True):
            feeds[value.name] = ort_tensors.from_array(np.asarray(array), value.type)
        try:
            results = self._session.run_with_ort_values(self._output_names, feeds)
        except Exception as error:  # onnxruntime's exceptions have no common base but Exception
            raise InputError(f"the ONNX model fails on these inputs: {runtime_message(error)}") from error
        found = dict(zip(self._output_names, results, strict=True))
        caches = {}
        for entry in self._entries:
            self._present[entry.input] = found.pop(entry.output)
            caches[entry.input] = ort_tensors.view(self._present[entry.input]).copy()
        arrays = {name: ort_tensors.view(value).copy() for name, value in found.items()}
        outputs = {name: array for name, array in arrays.items() if name not in self._watched}
        return StepResult(outputs, caches, arrays)


def _outputs_of(graph: ir.Model | onnx.ModelProto) -> list[Any]:
    return list(graph.graph.output if isinstance(graph, onnx.ModelProto) else graph.graph.outputs)


def watching_session(graph: ir.Model | onnx.ModelProto, watch: Collection[str]) -> Any:
    """A session of a copy of the model that has inner values as outputs. Weights in files are not copied."""
    proto = onnx.ModelProto()
    proto.CopyFrom(graph if isinstance(graph, onnx.ModelProto) else ir.to_proto(graph))
    known = {value.name for value in proto.graph.output}
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in watch if name not in known)
    folders = set() if isinstance(graph, onnx.ModelProto) else {t.base_dir for t in external_tensors(graph)}
    if not folders:
        return session(proto)
    if len(folders) > 1:
        raise InputError("the model's weights are in several folders, so its inner values cannot be looked at")
    options = default_session_options()
    folder = os.path.abspath(os.fspath(folders.pop()))
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
    return session(proto, session_options=options)


class TorchRunner:
    """An ExportedProgram as a module with buffers of its own: the program's are never written.

    Its caches are the buffers that a run writes. watch: nodes whose values are to be seen at each step; the graph is
    then interpreted node by node.
    """

    def __init__(self, program: ExportedProgram, *, watch: Collection[str] = ()) -> None:
        import torch
        from torch.export.graph_signature import InputKind
        from torch.utils import _pytree as pytree

        self._program = program
        self._watch = frozenset(watch)
        self._module: Any = program.module()
        self._buffers: dict[str, torch.Tensor] = {}
        for name, buffer in list(self._module.named_buffers()):
            owner_name, _, leaf = name.rpartition(".")
            self._buffers[name] = buffer.detach().clone()
            self._module.get_submodule(owner_name)._buffers[leaf] = self._buffers[name]
        self._versions = {name: buffer._version for name, buffer in self._buffers.items()}
        self._in_spec = program.call_spec.in_spec
        examples: list[Any] = pytree.tree_leaves(program.example_inputs) if program.example_inputs else []
        specs = [spec for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
        placeholders = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
        if len(examples) != len(specs):
            examples = [None] * len(specs)
        self.inputs = tuple(
            _torch_input(spec.arg.name, placeholders.get(spec.arg.name), example)
            for spec, example in zip(specs, examples, strict=True)
        )
        written = _written_buffers(program) & self._buffers.keys()
        self.caches = tuple(CacheSpec(tuple(self._buffers[name].shape), None) for name in sorted(written))
        self.bounds: Mapping[str, tuple[int, int]] = {
            str(symbol): _bounds(limits) for symbol, limits in program.range_constraints.items()
        }
        self.vocabulary = self._width()

    def weights(self) -> list[tuple[str, tuple[int, ...]]]:
        return [(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for t in self._program.parameters()]

    def step(self, values: list[Any]) -> StepResult:
        import torch
        from torch.utils import _pytree as pytree

        leaves = [_to_torch(value) if isinstance(value, np.ndarray) else value for value in values]
        if self._in_spec is None:
            raise InputError("the program does not say how it is called (its call_spec is empty); export it anew")
        arguments, keywords = pytree.tree_unflatten(leaves, self._in_spec)
        sites: dict[str, Array] = {}
        try:
            with torch.no_grad():
                watched = bool(self._watch)
                result = self._interpret(leaves, sites) if watched else self._module(*arguments, **keywords)
        except Exception as error:  # an operator, a guard or the interpreter; each with a type of its own
            text = " ".join(str(error).split())[:400]
            raise InputError(f"the exported program fails on these inputs: {type(error).__name__}: {text}") from error
        flat = pytree.tree_leaves(result)
        names = [str(name) for name in self._program.graph_signature.user_outputs]
        if len(names) != len(flat) or len(set(names)) != len(names):
            names = [f"output_{index}" for index in range(len(flat))]
        arrays = [_to_numpy(value) if isinstance(value, torch.Tensor) else np.asarray(value) for value in flat]
        written = [name for name, buffer in self._buffers.items() if buffer._version != self._versions[name]]
        caches = {name: _to_numpy(self._buffers[name]) for name in written}
        return StepResult(dict(zip(names, arrays, strict=True)), caches, sites)

    @property
    def module(self) -> Any:
        """The graph module that runs."""
        return self._module

    def _interpret(self, leaves: list[Any], sites: dict[str, Array]) -> Any:
        """Runs the graph and puts the values of the watched nodes, of several the first, into `sites`."""
        import torch

        watch = self._watch

        class Watcher(torch.fx.Interpreter):
            def run_node(self, n: torch.fx.Node) -> Any:
                result = super().run_node(n)
                if n.name in watch:
                    sites[n.name] = _to_numpy(result[0] if isinstance(result, (tuple, list)) else result)
                return result

        return Watcher(self._module).run(*leaves, enable_io_processing=False)

    def _width(self) -> int | None:
        names = self._program.graph_signature.user_outputs
        for node in self._program.graph.nodes:
            if names and node.name == names[0]:
                shape = getattr(node.meta.get("val"), "shape", ())
                return int(shape[-1]) if shape and isinstance(shape[-1], int) else None
        return None


def _known_type(value: Any) -> str:
    if ort_tensors.numpy_dtype(value.type) is None:
        raise InputError(f"{value.name!r} has the type {value.type}, which cannot be verified")
    return str(value.type)


def _known_dtype(value: Any) -> np.dtype[Any] | None:
    return ort_tensors.numpy_dtype(_known_type(value))


def _open_shape(name: str, shape: list[Any]) -> tuple[int | str, ...]:
    """Gives an open dimension without a name one that is its own."""
    return tuple(size if isinstance(size, int) else (size or f"{name}.{axis}") for axis, size in enumerate(shape))


def _torch_input(name: str, fake: Any, example: Any) -> InputSpec:
    import torch

    value = _to_numpy(example) if isinstance(example, torch.Tensor) else example
    if not isinstance(fake, torch.Tensor):
        return InputSpec(name, None, (), value)
    dtype = _to_numpy(torch.empty(0, dtype=fake.dtype)).dtype
    return InputSpec(name, dtype, tuple(s if isinstance(s, int) else str(s) for s in fake.shape), value)


def _written_buffers(program: ExportedProgram) -> set[str]:
    """Returns the buffers the graph writes: by its signature and, before decomposition, by operators that mutate."""
    signature = program.graph_signature
    written = set(signature.buffers_to_mutate.values())
    for node in program.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None:
            continue
        for index, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
                written.add(signature.inputs_to_buffers.get(getattr(value, "name", ""), ""))
    return written


def _bounds(limits: Any) -> tuple[int, int]:
    # The limits are numbers of a symbolic library; an open end does not become an int.
    def number(limit: Any, instead: int) -> int:
        try:
            return int(limit)
        except (TypeError, ValueError, OverflowError):
            return instead

    return number(limits.lower, 0), number(limits.upper, 1 << 62)


def _to_numpy(tensor: Any) -> Array:
    """Returns a copy."""
    import ml_dtypes
    import torch

    plain = tensor.detach().cpu().contiguous()
    if plain.dtype is torch.bfloat16:
        return np.array(plain.view(torch.int16).numpy()).view(ml_dtypes.bfloat16)
    return np.array(plain.numpy())


def _to_torch(array: Array) -> Any:
    import ml_dtypes
    import torch

    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))

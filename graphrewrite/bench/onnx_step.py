"""Steps that are ONNX models, run in onnxruntime with their caches written in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import helper

import graphrewrite as gr
from graphrewrite import ort_tensors
from graphrewrite.bench.contender import Step, Unavailable, buffers_for
from graphrewrite.bench.data import Array
from graphrewrite.errors import GraphRewriteError
from graphrewrite.sessions import OnnxModel, runtime_message

OUTPUT = "output"


@dataclass
class OnnxStep:
    """The parts of a model of one step.

    Attributes:
        nodes: they write `OUTPUT`, and for each cache the value `caches` names.
        inputs: what the step is given, by name.
        caches: what the caches hold before the step, by the name of the input.
        written: the output of each cache, by the name of its input.
    """

    output_shape: tuple[int, ...]
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    inputs: dict[str, Array] = field(default_factory=dict)
    caches: dict[str, Array] = field(default_factory=dict)
    written: dict[str, str] = field(default_factory=dict)

    def model(self, opsets: Mapping[str, int], value_info: Sequence[onnx.ValueInfoProto] = ()) -> onnx.ModelProto:
        """The parts as a model with fixed shapes."""
        inputs = [_info(name, array.dtype, array.shape) for name, array in {**self.inputs, **self.caches}.items()]
        outputs = [_info(OUTPUT, np.dtype(np.float32), self.output_shape)]
        outputs += [_info(self.written[name], array.dtype, array.shape) for name, array in self.caches.items()]
        graph = helper.make_graph(self.nodes, "layer", inputs, outputs, value_info=list(value_info))
        imports = [helper.make_opsetid(domain, version) for domain, version in opsets.items()]
        return helper.make_model(graph, opset_imports=imports, ir_version=10)

    def prepare(
        self,
        model: OnnxModel,
        threads: int,
        *,
        bytes_read: int,
        output: Callable[[Array], Array],
        held: Callable[[dict[str, Array]], tuple[Array, Array]],
        use_library: bool = False,
    ) -> Step:
        """Loads the model and binds it to as many sets of caches as it takes.

        Args:
            output: the model's output as [B,S,Hq,D].
            held: from the caches by input name, what the attention reads.
        """
        try:
            session = gr.session(model, threads, use_library=use_library)
        except GraphRewriteError as error:
            raise Unavailable(str(error)) from error
        result = ort_tensors.empty(self.output_shape, "tensor(float)")
        fixed = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in self.inputs.items()}
        sets = [self._bind(session, fixed, result) for _ in range(buffers_for(bytes_read))]
        first = sets[0].caches
        return Step(
            runs=sets,
            output=lambda: output(ort_tensors.view(result)),
            held=lambda: held({name: ort_tensors.view(value) for name, value in first.items()}),
            bytes_read=bytes_read,
        )

    def _bind(
        self, session: onnxruntime.InferenceSession, fixed: Mapping[str, Any], result: onnxruntime.OrtValue
    ) -> _BoundCaches:
        kinds = {value.name: value.type for value in session.get_inputs()}
        caches = {name: ort_tensors.from_array(array, kinds[name]) for name, array in self.caches.items()}
        binding = session.io_binding()
        for name, value in {**fixed, **caches}.items():
            binding.bind_ortvalue_input(name, value)
        binding.bind_ortvalue_output(OUTPUT, result)
        for name, value in caches.items():
            binding.bind_ortvalue_output(self.written[name], value)
        # The binding holds the tensors by address alone.
        return _BoundCaches(session, binding, caches, (fixed, result))


@dataclass(frozen=True)
class _BoundCaches:
    session: onnxruntime.InferenceSession
    binding: Any
    caches: dict[str, onnxruntime.OrtValue]
    kept: Any

    def __call__(self) -> None:
        try:
            self.session.run_with_iobinding(self.binding)
        except Exception as error:  # onnxruntime's exceptions have no common base but Exception
            raise Unavailable(runtime_message(error)) from error


def _info(name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(dtype), shape)

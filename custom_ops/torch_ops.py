"""The kernels as torch operators: importing this module defines `torch.ops.graphrewrite.*`.

Each operator of `graphrewrite.custom_ops.schema` becomes

    update_cache(value, cache, start_pos, *, layout="BSNH", ...) -> new_cache     functional: arguments stay as they are
    update_cache_(value, cache, start_pos, *, layout="BSNH", ...) -> ()           in place, where there is a cache

with the inputs of the ONNX operator in their order and its attributes as keywords. `start_pos` is an int or, in the
overload `per_sequence`, an int64 tensor with one position for each sequence. An output that a call does not have, such
as the zero points of a cache without them, is an empty tensor. The operators run on CPU with
`torch.get_num_threads()` threads; they trace (torch.export, torch.compile) through shape functions; they have no
gradient.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

import torch

from graphrewrite.custom_ops import capi
from graphrewrite.custom_ops.schema import AttributeSchema, OperatorSchema, TensorSchema, operators
from graphrewrite.errors import KernelError

__all__ = ["NAMESPACE", "PER_SEQUENCE"]

NAMESPACE = "graphrewrite"
PER_SEQUENCE = "per_sequence"
"""Name of the overloads that take a tensor of positions."""

_START_POS = "start_pos"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_TORCH_KINDS = {"int": "int", "bool": "bool", "float": "float", "string": "str"}

_Arguments: TypeAlias = "Mapping[str, torch.Tensor | int | None]"


class _Operator:
    """One operator as torch calls it.

    Attributes:
        in_place: whether outputs that replace an input are written to it; they are then no results.
        per_sequence: whether start_pos is a tensor.
    """

    def __init__(self, schema: OperatorSchema, in_place: bool, per_sequence: bool) -> None:
        self._schema = schema
        self._in_place = in_place
        self._per_sequence = per_sequence
        self._returned = [output for output in schema.outputs if not (in_place and output.in_place)]
        replaced = [schema.inputs[output.like].name for output in schema.outputs if output.in_place]
        self._mutated = replaced if in_place else []
        self.name = schema.torch_name + "_" * in_place

    def define(self) -> None:
        overload = f".{PER_SEQUENCE}" if self._per_sequence else ""
        operator = torch.library.custom_op(
            f"{NAMESPACE}::{self.name}{overload}",
            self._run,
            mutates_args=self._mutated,
            device_types="cpu",
            schema=self._torch_schema(),
        )
        operator.register_fake(self._infer)
        if self._in_place:
            # torch takes no backward function for an operator that writes to its arguments.
            qualified = f"{self.name}{overload}"
            _LIBRARY.impl(qualified, self._below_autograd, "Autograd", with_keyset=True, allow_override=True)
        else:
            operator.register_autograd(self._refuse_gradient)

    def _below_autograd(self, keyset: Any, *arguments: Any, **attributes: Any) -> Any:
        given = (*arguments, *attributes.values())
        if torch.is_grad_enabled() and any(isinstance(value, torch.Tensor) and value.requires_grad for value in given):
            self._refuse_gradient()
        overload = getattr(
            getattr(torch.ops.graphrewrite, self.name), PER_SEQUENCE if self._per_sequence else "default"
        )
        with torch._C._AutoDispatchBelowAutograd():
            return overload.redispatch(keyset & torch._C._after_autograd_keyset, *arguments, **attributes)

    def _torch_schema(self) -> str:
        aliases = iter("abcdefgh")
        inputs = [self._torch_input(tensor, aliases) for tensor in self._schema.inputs]
        attributes = [_torch_attribute(attribute) for attribute in self._schema.attributes]
        results = ["Tensor"] * len(self._returned)
        returned = results[0] if len(results) == 1 else f"({', '.join(results)})"
        return f"({', '.join([*inputs, '*', *attributes])}) -> {returned}"

    def _torch_input(self, tensor: TensorSchema, aliases: Any) -> str:
        if tensor.name == _START_POS and not self._per_sequence:
            return f"SymInt {_START_POS}"
        mutation = f"({next(aliases)}!)" if tensor.name in self._mutated else ""
        return f"Tensor{mutation}{'? ' if tensor.optional else ' '}{tensor.name}{'=None' if tensor.optional else ''}"

    def _named(self, arguments: Sequence[Any], attributes: dict[str, Any]) -> dict[str, torch.Tensor | int | None]:
        """Inputs by name; those given by keyword are taken out of `attributes`."""
        names = [tensor.name for tensor in self._schema.inputs]
        named = dict(zip(names, arguments, strict=False))
        return {name: named[name] if name in named else attributes.pop(name, None) for name in names}

    def _run(self, *arguments: Any, **attributes: Any) -> Any:
        inputs = self._named(arguments, attributes)
        outputs = self._outputs(inputs, attributes, self._in_place)
        capi.run(
            self._schema.name,
            [_view(f"{self.name}: {name}", value) for name, value in inputs.items()],
            [
                _view(f"{self.name}: {output.name}", value)
                for output, value in zip(self._schema.outputs, outputs, strict=True)
            ],
            attributes,
            threads=torch.get_num_threads(),
        )
        return self._results(inputs, outputs)

    def _infer(self, *arguments: Any, **attributes: Any) -> Any:
        inputs = self._named(arguments, attributes)
        _ShapeCheck(self._schema, self.name, inputs, attributes).run()
        return self._results(inputs, self._outputs(inputs, attributes, self._in_place))

    def _outputs(self, inputs: _Arguments, attributes: dict[str, Any], in_place: bool) -> list[torch.Tensor | None]:
        """New tensors, or the inputs that are written in place; None: the call has no such output."""
        outputs: list[torch.Tensor | None] = []
        for output in self._schema.outputs:
            like = inputs[self._schema.inputs[output.like].name]
            # Static scales are read and not replaced.
            if like is None or (output.optional and attributes.get("scheme") == "static"):
                outputs.append(None)
                continue
            assert isinstance(like, torch.Tensor)
            if in_place and output.in_place:
                outputs.append(like)
                continue
            shape = [*like.shape[:-1], 1] if output.per_row else list(like.shape)
            outputs.append(like.new_empty(shape, dtype=self._dtype(output, inputs)))
        return outputs

    def _dtype(self, output: TensorSchema, inputs: _Arguments) -> torch.dtype:
        for tensor in self._schema.inputs:
            value = inputs[tensor.name]
            if isinstance(value, torch.Tensor) and output.variable is not None and tensor.variable == output.variable:
                return value.dtype
        dtype = getattr(torch, output.dtypes[0])
        assert isinstance(dtype, torch.dtype)
        return dtype

    def _results(self, inputs: _Arguments, outputs: list[torch.Tensor | None]) -> Any:
        results = [
            torch.empty(0, dtype=self._dtype(schema, inputs)) if output is None else output
            for schema, output in zip(self._schema.outputs, outputs, strict=True)
            if schema in self._returned
        ]
        if not results:
            return None
        return results[0] if len(results) == 1 else tuple(results)

    def _refuse_gradient(self, *_: Any) -> NoReturn:
        raise NotImplementedError(
            f"{NAMESPACE}::{self.name} has no gradient: it is for inference. Run the model under torch.no_grad(), or "
            "train the program it was rewritten from"
        )


class _ShapeCheck:
    """What can be said about the inputs of one call without their values.

    Sizes are compared where they are known as numbers, and start_pos is never looked at, so that a position read out of
    a tensor, and dynamic sizes, trace without guards.
    """

    def __init__(self, schema: OperatorSchema, name: str, inputs: _Arguments, attributes: Mapping[str, Any]) -> None:
        self._name = name
        self._inputs = [(tensor, inputs[tensor.name]) for tensor in schema.inputs]
        self._layout = attributes.get("layout", "BSNH")
        self._sizes: dict[str, tuple[int, str]] = {}
        self._dtypes: dict[str, tuple[torch.dtype, str]] = {}

    def run(self) -> None:
        devices = {value.device.type for _, value in self._inputs if isinstance(value, torch.Tensor)}
        # A meta tensor among others brings a call here, and not to the kernel.
        self._that(len(devices) == 1, f"tensors are on {' and '.join(sorted(devices))}; expected one device")
        self._that(self._layout in ("BSNH", "BNSH"), f"layout is {self._layout!r}; expected BSNH or BNSH")
        for tensor, value in self._inputs:
            if isinstance(value, torch.Tensor):
                self._dtype(tensor, value)
                if tensor.shape is not None:
                    self._shape(tensor.name, tensor.shape, value)
        query_heads, heads = (self._sizes.get(symbol, (1, ""))[0] for symbol in ("Hq", "Hkv"))
        divides = heads > 0 and query_heads % heads == 0
        self._that(divides, f"{heads} key/value heads do not divide {query_heads} query heads")

    def _dtype(self, tensor: TensorSchema, value: torch.Tensor) -> None:
        name = _dtype_name(value.dtype)
        expected = " or ".join(tensor.dtypes)
        self._that(name in tensor.dtypes, f"{tensor.name} is {_described(value)}; expected {expected}")
        if tensor.variable is not None:
            other, owner = self._dtypes.setdefault(tensor.variable, (value.dtype, tensor.name))
            self._that(
                other == value.dtype, f"{tensor.name} is {_described(value)}, and {owner} has elements of {other}"
            )

    def _shape(self, name: str, symbols: tuple[str, ...], value: torch.Tensor) -> None:
        if symbols[0] == "...":
            self._that(value.dim() > 0, f"{name} has no dimensions")
            return
        self._that(value.dim() == len(symbols), f"{name} must have {len(symbols)} dimensions, not {_described(value)}")
        if len(symbols) == 4 and self._layout == "BNSH":
            symbols = (symbols[0], symbols[2], symbols[1], symbols[3])
        for symbol, size in zip(symbols, value.shape, strict=True):
            if isinstance(size, int):
                first, owner = self._sizes.setdefault(symbol, (size, name))
                expected = int(symbol) if symbol.isdigit() else first
                self._that(
                    size == expected,
                    f"{name} {_described(value)} has {size} in the place of {symbol}, which is {expected} in {owner}",
                )

    def _that(self, condition: bool, message: str) -> None:
        if not condition:
            raise ValueError(f"{NAMESPACE}::{self._name}: {message}")


def _torch_attribute(attribute: AttributeSchema) -> str:
    kind = _TORCH_KINDS[attribute.kind]
    if attribute.default is None:
        return f"{kind}? {attribute.name}=None"
    default = f'"{attribute.default}"' if isinstance(attribute.default, str) else attribute.default
    return f"{kind} {attribute.name}={default}"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _described(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _view(name: str, value: torch.Tensor | int | None) -> capi.Tensor | None:
    """`name`: of operator and argument, for messages."""
    if value is None:
        return None
    if not isinstance(value, torch.Tensor):
        memory = ctypes.c_int64(value)
        described = capi.tensor(ctypes.addressof(memory), capi.DTYPES["int64"], ())
        described.owner = memory
        return described
    if value.device.type != "cpu":
        raise KernelError(f"{name} is a tensor on {value.device}, expected cpu")
    dtype = _dtype_name(value.dtype)
    if dtype not in capi.DTYPES:
        known = ", ".join(capi.DTYPES)
        raise KernelError(f"{name} has element type {dtype}, which is not supported; expected one of {known}")
    strides = None if value.is_contiguous() else value.stride()
    return capi.tensor(value.data_ptr(), capi.DTYPES[dtype], value.shape, strides)


def _define_all() -> None:
    for schema in operators().values():
        forms = [False, True] if any(output.in_place for output in schema.outputs) else [False]
        takes_position = any(tensor.name == _START_POS for tensor in schema.inputs)
        for in_place in forms:
            for per_sequence in [False, True] if takes_position else [False]:
                _Operator(schema, in_place, per_sequence).define()


_define_all()

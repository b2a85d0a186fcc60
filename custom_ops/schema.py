"""What the kernel library says of its operators: the declarations that everything else about them is made from.

The torch operators, the ONNX schemas and the documentation are built from these, so an operator is described in one
place, the C++ file that declares it.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from typing import Any

from graphrewrite.custom_ops import capi

__all__ = ["AttributeSchema", "OperatorSchema", "TensorSchema", "operators"]


@dataclass(frozen=True)
class TensorSchema:
    """An input or output.

    Attributes:
        name: as error messages call it.
        shape: the symbols of its dimensions, such as `("B", "C", "Hkv", "D")`, in the layout BSNH; a leading "..."
            stands for any number of them. None: its rank is not fixed, see the operator's documentation.
        dtypes: element types it may have, by the names of `capi.DTYPES`.
        variable: tensors of a call that name the same variable have the same element type; None: there is one type.
        optional: whether it may be absent.
        like: of an output, the number of the input whose shape it has.
        per_row: of an output, whether the last dimension of that shape becomes 1.
        in_place: of an output, whether it is the new state of that input.
    """

    name: str
    shape: tuple[str, ...] | None
    dtypes: tuple[str, ...]
    variable: str | None
    optional: bool
    like: int = -1
    per_row: bool = False
    in_place: bool = False


@dataclass(frozen=True)
class AttributeSchema:
    """An attribute. `kind` is "int", "bool", "float" or "string"; ONNX writes a bool as an integer. A `default` of None
    means that the attribute may be absent, which says something of its own."""

    name: str
    kind: str
    default: bool | int | float | str | None
    doc: str


@dataclass(frozen=True)
class OperatorSchema:
    """An operator of the domain `graphrewrite`. Inputs and outputs are in order."""

    name: str
    since_version: int
    doc: str
    inputs: tuple[TensorSchema, ...]
    outputs: tuple[TensorSchema, ...]
    attributes: tuple[AttributeSchema, ...]

    @property
    def torch_name(self) -> str:
        """The name in torch, `update_cache` for `UpdateCache`."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", self.name).lower()

    @property
    def type_variables(self) -> dict[str, tuple[str, ...]]:
        """The element types that each type variable stands for, in order of appearance."""
        tensors = (*self.inputs, *self.outputs)
        return {tensor.variable: tensor.dtypes for tensor in tensors if tensor.variable is not None}


@functools.cache
def operators() -> dict[str, OperatorSchema]:
    """All operators of the library, by name.

    Raises:
        LibraryError: the library is not installed or cannot be loaded.
    """
    return {entry["name"]: _operator(entry) for entry in json.loads(capi.operators_json())}


def _operator(entry: dict[str, Any]) -> OperatorSchema:
    return OperatorSchema(
        entry["name"],
        entry["since_version"],
        entry["doc"].strip(),
        tuple(map(_tensor, entry["inputs"])),
        tuple(map(_tensor, entry["outputs"])),
        tuple(AttributeSchema(**attribute) for attribute in entry["attributes"]),
    )


def _tensor(entry: dict[str, Any]) -> TensorSchema:
    text = entry["shape"]
    shape = tuple(text.strip("[]").split(",")) if text else None
    return TensorSchema(**{**entry, "shape": shape, "dtypes": tuple(entry["dtypes"])})

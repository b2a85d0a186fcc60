"""Formulas that write ONNX nodes: a function body is built by evaluating its formula on symbolic terms.

    body = Body(opset=17)
    x = body.input("x")
    body.output("y", x * body.Sigmoid(x))

A `Term` is a value of the body together with its element type. Python numbers become constants of the other operand's
element type, so `(high - low) / 255.0` reads as the mathematics does and stays in one precision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

__all__ = ["VARIANT", "Body", "Term"]

VARIANT = "variant"
"""Attribute that tells calls of one operator with different bodies apart."""

Number: TypeAlias = "bool | int | float"
Operand: TypeAlias = "Term | bool | int | float"
Dimensions: TypeAlias = "Sequence[Term | int]"

_COMPARISONS = frozenset(
    {"Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal", "And", "Or", "Not", "IsNaN", "IsInf"}
)
_INTEGER_RESULTS = frozenset({"Shape", "Size"})


@dataclass(frozen=True, eq=False)
class Term:
    """A value of a function body. `dtype` is None where the body does not depend on the element type."""

    body: Body
    value: ir.Value
    dtype: ir.DataType | None

    def __add__(self, other: Operand) -> Term:
        return self.body.op("Add", self, other)

    def __radd__(self, other: Number) -> Term:
        return self.body.op("Add", other, self)

    def __sub__(self, other: Operand) -> Term:
        return self.body.op("Sub", self, other)

    def __rsub__(self, other: Number) -> Term:
        return self.body.op("Sub", other, self)

    def __mul__(self, other: Operand) -> Term:
        return self.body.op("Mul", self, other)

    def __truediv__(self, other: Operand) -> Term:
        return self.body.op("Div", self, other)

    def __rtruediv__(self, other: Number) -> Term:
        return self.body.op("Div", other, self)

    def __mod__(self, other: Operand) -> Term:
        return self.body.op("Mod", self, other)

    def __neg__(self) -> Term:
        return self.body.op("Neg", self)

    def __matmul__(self, other: Term) -> Term:
        return self.body.op("MatMul", self, other)

    def __lt__(self, other: Operand) -> Term:
        return self.body.op("Less", self, other)

    def __le__(self, other: Operand) -> Term:
        return self.body.op("LessOrEqual", self, other)

    def __gt__(self, other: Operand) -> Term:
        return self.body.op("Greater", self, other)

    def __ge__(self, other: Operand) -> Term:
        return self.body.op("GreaterOrEqual", self, other)

    def __and__(self, other: Term) -> Term:
        return self.body.op("And", self, other)

    def __or__(self, other: Term) -> Term:
        return self.body.op("Or", self, other)

    def __invert__(self) -> Term:
        return self.body.op("Not", self)

    def equals(self, other: Operand) -> Term:
        """Elementwise equality (`==` stays Python's identity)."""
        return self.body.op("Equal", self, other)

    def cast(self, dtype: ir.DataType) -> Term:
        """The term in another element type; itself when the type is already right."""
        if self.dtype == dtype:
            return self
        return self.as_type(dtype)

    def as_type(self, dtype: ir.DataType) -> Term:
        """A cast that is there whatever the term's element type."""
        return self.body.op("Cast", self, to=dtype.value, dtype=dtype)

    def size(self, axis: int) -> Term:
        """The extent of one axis as an int64 tensor of shape [1]."""
        return self.body.op("Gather", self.body.shape(self), self.body.constant([axis]), axis=0)

    def reshape(self, dimensions: Dimensions) -> Term:
        """Reshapes to `dimensions`, of which one may be -1; without a -1, a 0 is an empty axis."""
        exact = int(-1 not in [extent for extent in dimensions if isinstance(extent, int)])
        return self.body.op("Reshape", self, self.body.dimensions(dimensions), allowzero=exact)

    def expand(self, dimensions: Dimensions) -> Term:
        return self.body.op("Expand", self, self.body.dimensions(dimensions))

    def transpose(self, *permutation: int) -> Term:
        return self.body.op("Transpose", self, perm=permutation)

    def unsqueeze(self, *axes: int) -> Term:
        return self.body.op("Unsqueeze", self, self.body.constant(axes))

    def between(self, begin: Term, end: Term, axis: int) -> Term:
        """The entries begin, .., end - 1 (int64 [1]) along `axis`."""
        return self.body.op("Slice", self, begin, end, self.body.constant([axis]))


class Body:
    """Collects the nodes of one function body for one version of the default ONNX operator set."""

    def __init__(self, opset: int, variant: int | None = None) -> None:
        self.opset = opset
        self._variant = variant
        self._scopes: list[list[ir.Node]] = [[]]
        self._inputs: list[ir.Value] = []
        self._absent: list[ir.Value] = []
        self._outputs: list[ir.Value] = []
        self._constants: dict[tuple[str, tuple[int, ...], bytes], Term] = {}
        self._attributes: dict[str, Term] = {}
        self._shapes: dict[int, Term] = {}
        self._names: dict[str, int] = {}

    def input(self, name: str, dtype: ir.DataType | None = None) -> Term:
        """Declares the next formal input. The first one passes only calls that are meant for this variant."""
        term = Term(self, ir.Value(name=name), dtype)
        self._inputs += [*self._absent, term.value]
        self._absent = []
        if self._variant is None or len(self._inputs) > 1:
            return term
        is_meant = self.attribute(VARIANT, ir.AttributeType.INT).equals(self._variant)
        return self.require(is_meant, term, "the runtime must select function overloads (onnxruntime 1.28 or newer)")

    def optional_input(self, name: str, dtype: ir.DataType | None, present: bool) -> Term | None:
        """Declares the next formal input; None where the calls the body serves leave it out.

        Absent inputs at the end are not declared at all, as the calls do not name them either.
        """
        if not present:
            self._absent.append(ir.Value(name=name))
            return None
        return self.input(name, dtype)

    def output(self, name: str, term: Term) -> None:
        """Declares the next formal output: a term no other output has taken."""
        term.value.name = name
        self._outputs.append(term.value)

    def op(
        self,
        op_type: str,
        *operands: Operand | None,
        dtype: ir.DataType | None = None,
        name: str = "",
        **attributes: Any,
    ) -> Term:
        """Appends one node of the default operator set with one output.

        Numbers among the operands take the element type of the first term among them. The result's element type is
        `dtype`, or what the operator implies, or the first term's.
        """
        typed = next((operand.dtype for operand in operands if isinstance(operand, Term)), None)
        inputs = [
            operand.value
            if isinstance(operand, Term)
            else None
            if operand is None
            else self.constant(operand, typed).value
            for operand in operands
        ]
        output = ir.Value(name=self._fresh(op_type.lower()))
        node = ir.Node(
            "",
            op_type,
            inputs,
            attributes=[ir.convenience.convert_attribute(key, value) for key, value in attributes.items()],
            outputs=[output],
            name=name or None,
        )
        self._scopes[-1].append(node)
        if op_type in _COMPARISONS:
            typed = ir.DataType.BOOL
        elif op_type in _INTEGER_RESULTS:
            typed = ir.DataType.INT64
        return Term(self, output, dtype or typed)

    def __getattr__(self, op_type: str) -> Callable[..., Term]:
        if not op_type[:1].isupper():
            raise AttributeError(op_type)
        return lambda *operands, **attributes: self.op(op_type, *operands, **attributes)

    def constant(
        self, value: Number | Sequence[int] | Sequence[Sequence[int]], dtype: ir.DataType | None = None
    ) -> Term:
        """A constant; equal constants are one node. Without `dtype`, int64 for integers and float32 for floats."""
        if dtype is None:
            dtype = ir.DataType.FLOAT if np.asarray(value).dtype.kind == "f" else ir.DataType.INT64
        array = np.asarray(value, dtype=dtype.numpy())
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            term = Term(self, ir.Value(name=self._fresh("constant")), dtype)
            tensor = ir.tensor(array, dtype=dtype)
            # Constants go to the outermost scope, where every later node and branch sees them.
            self._scopes[0].append(
                ir.Node("", "Constant", [], attributes=[ir.AttrTensor("value", tensor)], outputs=[term.value])
            )
            self._constants[key] = term
        return self._constants[key]

    def attribute(self, name: str, kind: ir.AttributeType) -> Term:
        """The value the calling node gives to a float or int attribute, as a scalar."""
        field, dtype = {
            ir.AttributeType.FLOAT: ("value_float", ir.DataType.FLOAT),
            ir.AttributeType.INT: ("value_int", ir.DataType.INT64),
        }[kind]
        if name not in self._attributes:
            term = Term(self, ir.Value(name=self._fresh(name)), dtype)
            reference = ir.RefAttr(field, name, kind)
            self._scopes[0].append(ir.Node("", "Constant", [], attributes=[reference], outputs=[term.value]))
            self._attributes[name] = term
        return self._attributes[name]

    def shape(self, term: Term) -> Term:
        """The shape of a term as an int64 tensor, computed once per term and scope."""
        if len(self._scopes) > 1:
            return self.op("Shape", term)
        key = id(term.value)
        if key not in self._shapes:
            self._shapes[key] = self.op("Shape", term)
        return self._shapes[key]

    def dimensions(self, dimensions: Dimensions) -> Term:
        """A shape tensor from terms of shape [1] and fixed extents."""
        if all(isinstance(extent, int) for extent in dimensions):
            return self.constant([extent for extent in dimensions if isinstance(extent, int)])
        parts = [extent if isinstance(extent, Term) else self.constant([extent]) for extent in dimensions]
        return self.op("Concat", *parts, axis=0)

    def count(self, extent: Term, begin: Term | None = None) -> Term:
        """begin, begin + 1, .., extent - 1, from 0 without a `begin`, for int64 terms of shape [1]."""
        ends = [0 if term is None else self.op("Squeeze", term, self.constant([0])) for term in (begin, extent)]
        return self.op("Range", *ends, 1, dtype=ir.DataType.INT64)

    def reduce(self, op_type: str, term: Term, axis: int | None = None) -> Term:
        """ReduceMin or ReduceMax along one axis, which stays with extent 1, or over all elements to a scalar."""
        keep = int(axis is not None)
        if axis is None:
            return self.op(op_type, term, keepdims=keep)
        # Opset 18 turned the axes of ReduceMin and ReduceMax from an attribute into an input.
        if self.opset < 18:
            return self.op(op_type, term, axes=[axis], keepdims=keep)
        return self.op(op_type, term, self.constant([axis]), keepdims=keep)

    def where(self, condition: Term, chosen: Operand, other: Operand) -> Term:
        """Elementwise choice; two numbers are float32."""
        typed = next((operand.dtype for operand in (chosen, other) if isinstance(operand, Term)), None)
        terms = [operand if isinstance(operand, Term) else self.constant(operand, typed) for operand in (chosen, other)]
        return self.op("Where", condition, *terms, dtype=typed)

    def require(self, condition: Term, term: Term, sentence: str) -> Term:
        """`term` unchanged where the scalar `condition` holds; otherwise running the model fails.

        ONNX has no assertion. Taking element 0 of a tensor with a single element is the identity, and taking element
        1 is out of range, which every runtime reports together with the node's name: the sentence that was violated.
        """
        one = term.unsqueeze(0)
        return self.op("Gather", one, (~condition).cast(ir.DataType.INT64), axis=0, name=sentence)

    def choose(self, condition: Term, chosen: Callable[[], Term], other: Callable[[], Term]) -> Term:
        """If: evaluates only one of two branches, which may use any term of the body. `condition` is a scalar."""
        branches: dict[str, Any] = {}
        dtype: ir.DataType | None = None
        for key, branch in (("then_branch", chosen), ("else_branch", other)):
            with self._scope() as nodes:
                result = self.op("Identity", branch())
            dtype = result.dtype
            branches[key] = ir.Graph([], [result.value], nodes=nodes, name=self._fresh(key))
        return self.op("If", condition, dtype=dtype, **branches)

    def function(
        self, domain: str, name: str, attributes: Mapping[str, str | int | float | None], overload: str = ""
    ) -> ir.Function:
        """The finished function. `attributes` are those a calling node may set, with their defaults; None: without."""
        graph = ir.Graph(
            self._inputs,
            self._outputs,
            nodes=self._scopes[0],
            opset_imports={"": self.opset},
            name=name,
        )
        declared = [
            ir.Attr(key, ir.AttributeType.UNDEFINED, None)
            if default is None
            else ir.convenience.convert_attribute(key, default)
            for key, default in attributes.items()
        ]
        return ir.Function(domain, name, overload, graph=graph, attributes=declared)

    @contextmanager
    def _scope(self) -> Any:
        nodes: list[ir.Node] = []
        self._scopes.append(nodes)
        yield nodes
        self._scopes.pop()

    def _fresh(self, stem: str) -> str:
        self._names[stem] = self._names.get(stem, 0) + 1
        return f"{stem}_{self._names[stem]}"

"""The operators as ONNX schemas, for the tools that ask ONNX what an operator is: the checker and shape inference.

register()
onnx.checker.check_model(model, full_check=True)
"""

from __future__ import annotations

import functools
from typing import Any

import onnx
from onnx.defs import OpSchema

from graphrewrite.custom_ops.functions.signature import DOMAIN
from graphrewrite.custom_ops.schema import AttributeSchema, OperatorSchema, TensorSchema, operators

__all__ = ["onnx_schema", "register"]

_ONNX_TYPES = {"float32": "float", "float64": "double"}
_ATTRIBUTE_TYPES = {
    "int": OpSchema.AttrType.INT,
    "bool": OpSchema.AttrType.INT,
    "float": OpSchema.AttrType.FLOAT,
    "string": OpSchema.AttrType.STRING,
}


def register() -> None:
    """Makes the operators known to ONNX in this process. Doing so again changes nothing."""
    for schema in operators().values():
        if not onnx.defs.has(schema.name, DOMAIN):
            onnx.defs.register_schema(onnx_schema(schema))


def onnx_schema(schema: OperatorSchema) -> OpSchema:
    """The schema of one operator. Its shape inference gives each output the shape and type its declaration says."""
    result = OpSchema(
        schema.name,
        DOMAIN,
        schema.since_version,
        schema.doc,
        inputs=[_parameter(tensor) for tensor in schema.inputs],
        outputs=[_parameter(tensor) for tensor in schema.outputs],
        type_constraints=[
            (name, [_type(dtype) for dtype in dtypes], "") for name, dtypes in schema.type_variables.items()
        ],
        attributes=[_attribute(attribute) for attribute in schema.attributes],
    )
    # Added in onnx 1.21; without it shapes come from the function bodies of a model alone.
    if hasattr(result, "set_type_and_shape_inference_function"):
        result.set_type_and_shape_inference_function(functools.partial(_infer, schema))
    return result


def _parameter(tensor: TensorSchema) -> OpSchema.FormalParameter:
    option = OpSchema.FormalParameterOption.Optional if tensor.optional else OpSchema.FormalParameterOption.Single
    shape = "" if tensor.shape is None else f"[{','.join(tensor.shape)}]"
    return OpSchema.FormalParameter(tensor.name, tensor.variable or _type(tensor.dtypes[0]), shape, param_option=option)


def _attribute(attribute: AttributeSchema) -> OpSchema.Attribute:
    if attribute.default is None:
        return OpSchema.Attribute(attribute.name, _ATTRIBUTE_TYPES[attribute.kind], attribute.doc, required=False)
    value = int(attribute.default) if isinstance(attribute.default, bool) else attribute.default
    default = onnx.helper.make_attribute(attribute.name, float(value) if attribute.kind == "float" else value)
    return OpSchema.Attribute(attribute.name, default, attribute.doc)


def _type(dtype: str) -> str:
    return f"tensor({_ONNX_TYPES.get(dtype, dtype)})"


def _infer(schema: OperatorSchema, context: Any) -> None:
    for index, output in enumerate(schema.outputs[: context.get_num_outputs()]):
        like = context.get_input_type(output.like) if output.like < context.get_num_inputs() else None
        if like is None:
            continue
        inferred = onnx.TypeProto()
        inferred.CopyFrom(like)
        if output.variable is None:
            inferred.tensor_type.elem_type = onnx.TensorProto.DataType.Value(
                _ONNX_TYPES.get(output.dtypes[0], output.dtypes[0]).upper()
            )
        if output.per_row and inferred.tensor_type.HasField("shape") and inferred.tensor_type.shape.dim:
            inferred.tensor_type.shape.dim[-1].Clear()
            inferred.tensor_type.shape.dim[-1].dim_value = 1
        context.set_output_type(index, inferred)

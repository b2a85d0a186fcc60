"""What the kernel library declares of its operators, and what is made from it: ONNX schemas, documentation."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from graphrewrite.custom_ops.documentation import main, pages
from graphrewrite.custom_ops.functions import DOMAIN
from graphrewrite.custom_ops.functions.bodies import has_body
from graphrewrite.custom_ops.onnx_schema import onnx_schema, register
from graphrewrite.custom_ops.schema import operators

DOCS = Path(__file__).parent.parent / "docs" / "operators"
NAMES = sorted(operators())


def test_all_operators_are_declared() -> None:
    assert NAMES == [
        "ChooseQParamsPerToken",
        "CustomQuantizedSdpa",
        "CustomSdpa",
        "DequantizePerChannel",
        "DequantizePerToken",
        "QuantizePerChannel",
        "QuantizePerToken",
        "SdpaWithKvCache",
        "UpdateCache",
        "UpdateCacheWithIndices",
        "UpdateQuantizedCache",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_a_declaration_is_whole(name: str) -> None:
    schema = operators()[name]
    assert schema.doc
    assert has_body(DOMAIN, name)
    tensors = (*schema.inputs, *schema.outputs)
    assert len({tensor.name for tensor in tensors}) == len(tensors)
    assert all(tensor.dtypes and tensor.name for tensor in tensors)
    assert all(attribute.doc for attribute in schema.attributes)
    for output in schema.outputs:
        like = schema.inputs[output.like]
        if output.in_place:
            assert (output.name, output.dtypes) == (f"new_{like.name}", like.dtypes)
    # torch takes no argument without a default after one that has a default.
    optional = [tensor.optional for tensor in schema.inputs]
    assert optional == sorted(optional)


@pytest.mark.parametrize("name", NAMES)
def test_the_onnx_schema_says_the_same(name: str) -> None:
    schema, onnx_form = operators()[name], onnx_schema(operators()[name])
    assert [parameter.name for parameter in onnx_form.inputs] == [tensor.name for tensor in schema.inputs]
    assert [parameter.name for parameter in onnx_form.outputs] == [tensor.name for tensor in schema.outputs]
    assert set(onnx_form.attributes) == {attribute.name for attribute in schema.attributes}
    assert onnx_form.min_input == sum(not tensor.optional for tensor in schema.inputs)
    assert onnx_form.since_version == schema.since_version


def test_onnx_checks_and_infers_with_the_schemas() -> None:
    register()
    register()
    text = """
        <ir_version: 10, opset_import: ["" : 21, "graphrewrite" : 1]>
        g (float[B,S,4,8] q, int8[B,C,2,8] k, float[B,C,2,1] s, int64 p, float16[7,D] x) => (y, t, z) {
            y = graphrewrite.CustomSdpa(q, k, k, p, s, , s)
            t, z = graphrewrite.ChooseQParamsPerToken(x)
        }"""
    model = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text), strict_mode=True)
    found = {
        value.name: (
            value.type.tensor_type.elem_type,
            [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim],
        )
        for value in model.graph.output
    }
    assert found == {
        "y": (onnx.TensorProto.FLOAT, ["B", "S", 4, 8]),
        "t": (onnx.TensorProto.DOUBLE, [7, 1]),
        "z": (onnx.TensorProto.INT64, [7, 1]),
    }
    onnx.checker.check_model(model, full_check=True)
    model.graph.node[0].attribute.append(onnx.helper.make_attribute("no_such_attribute", 1))
    with pytest.raises(onnx.checker.ValidationError, match="no_such_attribute"):
        onnx.checker.check_model(model)


def test_the_documentation_is_what_the_code_says() -> None:
    written = {path.name: path.read_text(encoding="utf-8") for path in DOCS.glob("*")}
    assert written == pages(), "run `make docs` and commit what it changes"


def test_documentation_of_operators_that_are_no_more_goes(tmp_path: Path) -> None:
    (tmp_path / "Gone.md").write_text("old")
    main(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(pages())

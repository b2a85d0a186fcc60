"""Every element type a cache may have: allocated, filled and read back."""

from __future__ import annotations

import numpy as np
import pytest

from graphrewrite import ort_tensors


@pytest.mark.parametrize("ort_type", sorted(ort_tensors._DTYPES))
@pytest.mark.parametrize("shape", [(2, 3), (), (0, 3)])
def test_values_are_what_was_written(ort_type: str, shape: tuple[int, ...]) -> None:
    value = ort_tensors.from_array(np.ones(shape, np.float32), ort_type)
    assert value.data_type() == ort_type and tuple(value.shape()) == shape
    assert ort_tensors.view(value).dtype == ort_tensors.numpy_dtype(ort_type)
    assert ort_tensors.view(value).shape == shape
    assert np.all(ort_tensors.view(value).astype(np.float32) == 1)


def test_a_view_writes_to_the_tensor() -> None:
    value = ort_tensors.from_array(np.zeros(3, np.float32), "tensor(float)")
    ort_tensors.view(value)[1] = 5
    np.testing.assert_array_equal(value.numpy(), [0, 5, 0])


def test_a_type_without_an_array_is_none() -> None:
    assert ort_tensors.numpy_dtype("tensor(string)") is None
    assert ort_tensors.numpy_dtype("seq(tensor(float))") is None

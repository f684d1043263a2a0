"""Embedding rows in the model's basis: the same bits for a row alone, in a table, in any order."""

from __future__ import annotations

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from edge_runtime.convert.hadamard import random_rotation
from edge_runtime.model.load import rotate_rows

F = np.float32
number = st.floats(-(2.0**30), 2.0**30, width=32)


@pytest.mark.parametrize("H", [12, 64, 92, 96, 576])
def test_rotated_rows_are_close_to_the_product(H: int) -> None:
    rotation = random_rotation(H, 0)
    rows = np.random.default_rng(0).standard_normal((50, H)).astype(F)
    rows[3] *= F(1e-30)
    rows[4] = 0
    codes, scale = rotate_rows(rows, rotation.matrix.numpy(), rotation.scale)
    want = rows.astype(np.float64) @ rotation.dense().numpy()
    error = np.abs(codes * scale[:, None].astype(np.float64) - want)
    # half a step of the int8 code
    assert (error <= 0.5001 * scale[:, None]).all()
    assert scale[4] == 0


@pytest.mark.parametrize("H", [12, 20, 22])  # ±1, ±1, and no Hadamard matrix: fp32
def test_the_order_of_the_sum_does_not_show(H: int) -> None:
    rotation = random_rotation(H, 1)
    R = rotation.matrix.numpy()
    order = np.random.default_rng(2).permutation(H)

    @hypothesis.given(hnp.arrays(F, (3, H), elements=number))
    def check(rows: np.ndarray) -> None:
        codes, scale = rotate_rows(rows, R, rotation.scale)
        again, scale_again = rotate_rows(rows[:, order], R[order], rotation.scale)
        assert np.array_equal(codes, again)
        assert np.array_equal(scale, scale_again)
        alone, scale_alone = rotate_rows(rows[1:2], R, rotation.scale)
        assert np.array_equal(codes[1:2], alone)
        assert scale_alone.tobytes() == scale[1:2].tobytes()

    check()

"""Bit order of the nibble planes: exact, all values, all group sizes."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from edge_runtime.kernels import pack

Q4, QR = np.meshgrid(np.arange(-8, 8, dtype=np.int8), np.arange(-8, 8, dtype=np.int8))


def test_the_byte_is_the_weight() -> None:
    """All 256 nibble pairs: the byte as int8 is the code plus 8, also where the code is illegal."""
    base = pack.pack_base(np.repeat(Q4, 2, axis=1), 2)
    refine = pack.pack_refine(np.repeat(QR, 2, axis=1), 2)
    byte = ((base & 15) << 4) | (refine & 15)
    code = 16 * Q4.astype(np.int16) + QR
    legal = code >= -128
    assert np.array_equal(byte.view(np.int8)[legal], code[legal] + 8)
    assert np.array_equal(byte, ((code + 8) & 255).astype(np.uint8))
    assert np.array_equal(((base & 15) << 4).view(np.int8), 16 * Q4)


def test_low_nibble_first_half_of_the_group() -> None:
    nibbles = np.arange(16, dtype=np.uint8)[None]
    assert pack.pack_plane(nibbles, 16).tolist() == [[x | (x + 8) << 4 for x in range(8)]]
    assert pack.pack_plane(nibbles, 4).tolist() == [
        [0x20, 0x31, 0x64, 0x75, 0xA8, 0xB9, 0xEC, 0xFD]
    ]


def test_kv_pairs_the_halves_of_the_head() -> None:
    q4 = np.array([[-8, -1, 0, 7]], dtype=np.int8)
    assert pack.pack_kv_base(q4).tolist() == [[0x08, 0x7F]]
    assert pack.pack_kv_refine(q4).tolist() == [[0x80, 0xF7]]


@hypothesis.given(
    data=st.data(),
    G=st.sampled_from([2, 32, 64, 128]),
    N=st.integers(0, 5),
    groups=st.integers(0, 4),
)
@hypothesis.settings(max_examples=60, deadline=None)
def test_unpack_inverts_pack(data: st.DataObject, G: int, N: int, groups: int) -> None:
    codes = data.draw(hnp.arrays(np.int8, (N, groups * G), elements=st.integers(-8, 7)))
    for pack_codes, unpack_codes in (
        (pack.pack_base, pack.unpack_base),
        (pack.pack_refine, pack.unpack_refine),
    ):
        plane = pack_codes(codes, G)
        assert plane.shape == (N, groups * G // 2)
        assert plane.dtype == np.uint8
        back = unpack_codes(plane, G)
        assert back.dtype == np.int8
        assert np.array_equal(back, codes)


@hypothesis.given(codes=hnp.arrays(np.int8, (3, 2, 80), elements=st.integers(-8, 7)))
@hypothesis.settings(max_examples=30, deadline=None)
def test_kv_unpack_inverts_pack(codes: pack.I8) -> None:
    assert np.array_equal(pack.unpack_base(pack.pack_kv_base(codes), 80), codes)
    assert np.array_equal(pack.unpack_refine(pack.pack_kv_refine(codes), 80), codes)
    assert pack.pack_kv_base(codes).shape == (3, 2, 40)


@hypothesis.given(plane=hnp.arrays(np.uint8, (2, 64)), G=st.sampled_from([32, 64, 128]))
@hypothesis.settings(max_examples=30, deadline=None)
def test_pack_inverts_unpack(plane: pack.U8, G: int) -> None:
    assert np.array_equal(pack.pack_plane(pack.unpack_plane(plane, G), G), plane)


def test_strided_input() -> None:
    codes = np.arange(-8, 8, dtype=np.int8).reshape(1, 16).repeat(8, 0)
    strided = np.asfortranarray(codes)[::2]
    assert np.array_equal(pack.pack_base(strided, 16), pack.pack_base(codes[:4], 16))


@pytest.mark.parametrize("G", [0, 3, 64])
def test_group_that_does_not_fit(G: int) -> None:
    with pytest.raises(AssertionError):
        pack.pack_base(np.zeros((1, 96), np.int8), G)


def test_codes_outside_the_nibble() -> None:
    with pytest.raises(AssertionError, match="8"):
        pack.pack_refine(np.full((1, 4), 8, np.int8), 4)
    with pytest.raises(AssertionError, match="-9"):
        pack.pack_base(np.full((1, 4), -9, np.int8), 4)

"""Bit order: nibble planes of weights and of the KV cache, in the canonical order of the disk.

Invariant: this is the only code that knows which bit is where. Everything else holds codes:
q4 in [-8, 7] (base), qr in [-8, 7] and 0…7 where q4 = -8 (refinement), target = 16·q4 + qr.

How: a plane is uint8 [N, Kp/2]. Inside a group of G inputs, byte j holds input j in its low nibble
and input j + G/2 in its high nibble. The base nibble is q4 in two's complement, the refinement
nibble is qr + 8, so the byte (base << 4) | refinement is, as int8, the target code plus 8, and
base << 4 is the draft code 16·q4: no sign extension anywhere. KV planes pair dimension i with
i + D/2 the same way. Source: DESIGN section 4; bitnest paper section 3.3 (two planes).

Not here: the order in which a backend repacks these planes for its own loads.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]
I8 = NDArray[np.int8]


def pack_plane(nibbles: U8, G: int) -> U8:
    """Pack nibbles 0…15 [..., Kp] into bytes [..., Kp/2], Kp a multiple of the even group G."""
    *lead, K = nibbles.shape
    _check_group(K, G)
    assert nibbles.dtype == np.uint8, nibbles.dtype
    assert nibbles.max(initial=0) <= 15, "a nibble above 15"
    halves = nibbles.reshape(*lead, K // G, 2, G // 2)
    packed: U8 = halves[..., 0, :] | (halves[..., 1, :] << np.uint8(4))
    return packed.reshape(*lead, K // 2)


def unpack_plane(plane: U8, G: int) -> U8:
    """Invert `pack_plane`: bytes [..., Kp/2] to nibbles [..., Kp]."""
    *lead, half = plane.shape
    _check_group(2 * half, G)
    assert plane.dtype == np.uint8, plane.dtype
    packed = plane.reshape(*lead, 2 * half // G, 1, G // 2)
    return np.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], axis=-2).reshape(
        *lead, 2 * half
    )


def pack_base(q4: I8, G: int) -> U8:
    """Pack base codes q4 in [-8, 7], int8 [..., Kp], into a plane [..., Kp/2]."""
    _check_codes(q4)
    return pack_plane(q4.view(np.uint8) & np.uint8(15), G)


def unpack_base(plane: U8, G: int) -> I8:
    """Invert `pack_base`."""
    codes: I8 = (unpack_plane(plane, G) ^ np.uint8(8)).view(np.int8) - np.int8(8)
    return codes


def pack_refine(qr: I8, G: int) -> U8:
    """Pack refinement codes qr in [-8, 7], int8 [..., Kp], into a plane [..., Kp/2]."""
    _check_codes(qr)
    return pack_plane((qr + np.int8(8)).view(np.uint8), G)


def unpack_refine(plane: U8, G: int) -> I8:
    """Invert `pack_refine`."""
    codes: I8 = unpack_plane(plane, G).view(np.int8) - np.int8(8)
    return codes


def pack_kv_base(q4: I8) -> U8:
    """Pack base codes of a vector [..., D] into [..., D/2]; byte i holds i and i + D/2."""
    return pack_base(q4, q4.shape[-1])


def pack_kv_refine(qr: I8) -> U8:
    """Pack refinement codes of a vector [..., D] into [..., D/2]; byte i holds i and i + D/2."""
    return pack_refine(qr, qr.shape[-1])


def _check_group(K: int, G: int) -> None:
    assert G > 0, G
    assert G % 2 == 0, f"odd group {G}"
    assert K % G == 0, f"{K} inputs in groups of {G}"


def _check_codes(codes: I8) -> None:
    assert codes.dtype == np.int8, codes.dtype
    low, high = int(codes.min(initial=0)), int(codes.max(initial=0))
    assert -8 <= low <= high <= 7, f"codes {low}…{high} outside -8…7"

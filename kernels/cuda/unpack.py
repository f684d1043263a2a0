"""Nibble planes to int8 codes, four bytes in one register: inline assembly, and its plain twin.

Invariant: both forms give the same bytes for every pair of plane bytes (`tests/kernels/cuda`).
A byte of a plane holds input j of its group in the low nibble and input j + G/2 in the high one.
`ASM` chooses: Triton's interpreter knows no assembly, and Triton's own code for the plain form
works byte by byte (2.5 times the instructions).
"""

from __future__ import annotations

import triton
import triton.language as tl

# lop3 tables: 0xE2 is (mask & b) | (~mask & a) with the mask as second operand
_W8_LOW = tl.constexpr("{ .reg .b32 t; shl.b32 t, $1, 4; lop3.b32 $0, t, 0xF0F0F0F0, $2, 0xE2; }")
_W8_HIGH = tl.constexpr("{ .reg .b32 t; shr.u32 t, $2, 4; lop3.b32 $0, $1, 0xF0F0F0F0, t, 0xE2; }")
_W4_LOW = tl.constexpr("{ .reg .b32 t; shl.b32 t, $1, 4; and.b32 $0, t, 0xF0F0F0F0; }")
# as mad.wide.s32 ptxas makes three instructions of it, in this form one
_MULTIPLY_ADD = tl.constexpr("{ .reg .b64 t; mul.wide.s32 t, $1, $2; add.s64 $0, $3, t; }")
_W4_HIGH = tl.constexpr("and.b32 $0, $1, 0xF0F0F0F0;")
HIGH_NIBBLES = tl.constexpr(-252645136)  # 0xF0F0F0F0


@triton.jit
def load_plane(ptr, at, inside, EVEN: tl.constexpr):
    """Bytes or words of a plane, 0 outside; read once, so they leave the L2 before what stays."""
    if EVEN:
        return tl.load(ptr + at, eviction_policy="evict_first")
    else:
        return tl.load(ptr + at, mask=inside, other=0, eviction_policy="evict_first")


@triton.jit
def w8_codes(base, refine, ASM: tl.constexpr):
    """base, refine: uint8 [...] -> int8 code + 8 of the low nibbles, of the high nibbles."""
    if ASM:
        low = tl.inline_asm_elementwise(
            _W8_LOW, "=r,r,r", [base, refine], dtype=tl.int8, is_pure=True, pack=4
        )
        high = tl.inline_asm_elementwise(
            _W8_HIGH, "=r,r,r", [base, refine], dtype=tl.int8, is_pure=True, pack=4
        )
    else:
        low = ((base << 4) | (refine & 15)).to(tl.int8, bitcast=True)
        high = ((base & 240) | (refine >> 4)).to(tl.int8, bitcast=True)
    return low, high


@triton.jit
def w4_codes(base, ASM: tl.constexpr):
    """base: uint8 [...] -> int8 16·q4 of the low nibbles, of the high nibbles."""
    if ASM:
        low = tl.inline_asm_elementwise(
            _W4_LOW, "=r,r", [base], dtype=tl.int8, is_pure=True, pack=4
        )
        high = tl.inline_asm_elementwise(
            _W4_HIGH, "=r,r", [base], dtype=tl.int8, is_pure=True, pack=4
        )
    else:
        low = (base << 4).to(tl.int8, bitcast=True)
        high = (base & 240).to(tl.int8, bitcast=True)
    return low, high


@triton.jit
def word_codes(base, refine, W8: tl.constexpr, ASM: tl.constexpr):
    """As the two above, of int32 words of four bytes; refine is not read in the w4 view."""
    if W8 and ASM:
        low = tl.inline_asm_elementwise(
            _W8_LOW, "=r,r,r", [base, refine], dtype=tl.int32, is_pure=True, pack=1
        )
        high = tl.inline_asm_elementwise(
            _W8_HIGH, "=r,r,r", [base, refine], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        low = (base << 4) & HIGH_NIBBLES
        high = base & HIGH_NIBBLES
        if W8:
            low = low | (refine & ~HIGH_NIBBLES)
            high = high | ((refine >> 4) & ~HIGH_NIBBLES)
    return low, high


@triton.jit
def quarters(x):
    """[..., 4·n] -> every fourth, from 0, 1, 2 and 3 on: what one 128-bit load brings."""
    n: tl.constexpr = x.shape[len(x.shape) - 1] // 4
    if len(x.shape) == 2:
        even, odd = tl.split(tl.reshape(x, [x.shape[0], n, 2, 2]))
    else:
        even, odd = tl.split(tl.reshape(x, [1, n, 2, 2]))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def dot4(a, b, c, ASM: tl.constexpr):
    """c + Σ of the four int8 products in the words a and b, int32 [...] each (dp4a)."""
    if ASM:
        total = tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;",
            "=r,r,r,r",
            [a, b, c],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        total = c
        for byte in tl.static_range(4):
            total += ((a << (24 - 8 * byte)) >> 24) * ((b << (24 - 8 * byte)) >> 24)
    return total


@triton.jit
def multiply_add(dots, mult, acc, ASM: tl.constexpr):
    """acc + dots · mult: int32, int32, int64 [...]; exact."""
    if ASM:
        total = tl.inline_asm_elementwise(
            _MULTIPLY_ADD,
            "=l,r,r,l",
            [dots, mult, acc],
            dtype=tl.int64,
            is_pure=True,
            pack=1,
        )
    else:
        total = acc + dots.to(tl.int64) * mult.to(tl.int64)
    return total

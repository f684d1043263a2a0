"""Compile the kernels of the 16-bit baseline for sm_87 and print what they are made of, as JSON.

A program of its own: whether Triton compiles or interprets is settled once per process.
"""

from __future__ import annotations

import json
from typing import Any

from edge_runtime.kernels.cuda import half_attention, half_attention_kernels, half_kernels
from edge_runtime.kernels.cuda.compile import compile_kernel, inspect
from edge_runtime.kernels.cuda.half_attention import STAGES

TYPES = {
    "position_ptr": "*i32", "part_ptr": "*fp32", "stat_ptr": "*fp32", "cos_ptr": "*fp32",
    "sin_ptr": "*fp32", "scale": "fp32", "eps": "fp32",
}  # fmt: skip
SPLIT = {"D": 128, "SPLIT": 128, "MASKED": True}
CASES: list[tuple[Any, int, dict[str, Any], dict[str, str]]] = [
    *(
        (
            half_attention_kernels.attend16,
            warps,
            SPLIT | {"GROUP": 4, "DP": 128, "BQ": queries, "BT": step, "STAGES": STAGES},
            {},
        )
        for queries in (16, 32, 64, 128)
        for step, warps in (half_attention.tile(queries),)
    ),
    (half_attention_kernels.combine16, 4, SPLIT | {"SPLITS": 16}, {}),
    (half_attention_kernels.combine16, 4, SPLIT | {"SPLITS": 256}, {"y_ptr": "*fp32"}),
    (half_kernels.norm16, 16, {"BLOCK": 4096}, {}),
    (half_kernels.silu_mul16, 4, {"BLOCK": 1024}, {}),
    (half_kernels.rope16, 1, {"D": 128, "HP": 64, "BIAS": True, "QK_NORM": False}, {}),
    (
        half_kernels.rope16,
        1,
        {"D": 128, "HP": 64, "BIAS": False, "QK_NORM": True},
        {"qkv_ptr": "*fp32"},
    ),
]


def main() -> None:
    for dtype in ("*fp16", "*bf16"):
        for kernel, warps, constants, types in CASES:
            known = {
                n: TYPES.get(n, dtype if n.endswith("_ptr") else "i32")
                for n in kernel.arg_names
                if n not in constants
            } | types
            report = inspect(compile_kernel(kernel, known, constants, num_warps=warps))
            facts = {
                "kernel": f"{kernel.__name__} {dtype} {constants}",
                "registers": report.registers,
                "stack": report.stack_bytes,
                "spills": report.spills,
                "shared": report.shared_bytes,
                "narrow": report.byte_loads,
                "wide": report.wide_loads,
            }
            print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()

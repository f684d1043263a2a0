"""Compile the small kernels for sm_87 and print what their machine code is made of, as JSON.

A program of its own: whether Triton compiles or interprets is settled once per process.
"""

from __future__ import annotations

import json
from typing import Any

from edge_runtime.kernels.cuda import activation_kernels as activations
from edge_runtime.kernels.cuda import embedding_kernels as embedding
from edge_runtime.kernels.cuda import head_kernels as head
from edge_runtime.kernels.cuda import ngram_kernels as ngram
from edge_runtime.kernels.cuda import sampling_kernels
from edge_runtime.kernels.cuda.compile import compile_kernel, inspect

TYPES = {
    "x_ptr": "*fp32", "y_ptr": "*fp32", "peak_ptr": "*i32", "codes_ptr": "*i8",
    "scale_ptr": "*fp32", "sums_ptr": "*i32", "logits_ptr": "*fp32", "seen_ptr": "*u8",
    "allowed_ptr": "*i32", "partial_ptr": "*i64", "flags_ptr": "*i32", "index_ptr": "*i32",
    "finite_ptr": "*i32", "ints_ptr": "*i64", "floats_ptr": "*fp64", "peaks_ptr": "*fp64",
    "bounds_ptr": "*fp32", "scores_ptr": "*fp64", "sorted_ptr": "*fp64", "order_ptr": "*i64",
    "mass_ptr": "*fp64", "keep_ptr": "*i32", "values_ptr": "*fp64", "tokens_ptr": "*i32",
    "length_ptr": "*i32", "drafted_ptr": "*i32", "count_ptr": "*i32", "num_ptr": "*i32",
    "table_ptr": "*i8", "rows_ptr": "*fp32", "out_ptr": "*fp32", "eps": "fp32",
}  # fmt: skip
FLAGS = {"HAS_SEEN": True, "HAS_ALLOWED": True, "BLOCK": 1024}
IDS = {"ids_ptr": "*i32"}

# kernel, warps, constants, types that differ
CASES: list[tuple[Any, int, dict[str, Any], dict[str, str]]] = [
    *(
        (activations.quantise_kernel, warps, {"G": 64, "BLOCK": block}, {})
        for block, warps in ((256, 2), (1024, 8), (4096, 8), (16384, 8), (32768, 16))
    ),
    *(
        (activations.norm_quantise_kernel, warps, {"G": 64, "BLOCK": block, "UNROLL": unroll}, {})
        for block, warps, unroll in (
            (256, 2, 8),
            (1024, 4, 8),
            (4096, 4, 32),
            (8192, 4, 64),
            (16384, 16, 64),
            (32768, 16, 64),
        )
    ),
    (activations.silu_mul_kernel, 4, {"CHUNK": 1024}, {}),
    (activations.quantise_chunks_kernel, 4, {"G": 128, "CHUNK": 1024, "CHUNKS": 16}, {}),
    (embedding.embed_kernel, 2, {"HAS_ROWS": False, "BLOCK": 1024}, IDS),
    (embedding.embed_kernel, 2, {"HAS_ROWS": True, "BLOCK": 1024}, {"ids_ptr": "*i64"}),
    (head.argmax_blocks_kernel, 4, {"HAS_ALLOWED": False, "BLOCK": 2048}, {}),
    (head.argmax_combine_kernel, 1, {"BLOCKS": 64}, {}),
    (ngram.ngram_blocks_kernel, 4, {"BLOCK": 1024}, {"partial_ptr": "*i32"}),
    (ngram.ngram_copy_kernel, 1, {"BLOCKS": 32, "WIDTH": 8}, {"partial_ptr": "*i32", **IDS}),
    (sampling_kernels.peaks_kernel, 4, FLAGS, {}),
    (sampling_kernels.screen_kernel, 4, {**FLAGS, "BLOCKS": 128, "GROUP": 128}, {}),
    (
        sampling_kernels.decide_kernel,
        4,
        {**FLAGS, "BLOCKS": 128, "GROUPS": 1024, "GROUP": 128},
        {},
    ),
    (sampling_kernels.scores_kernel, 4, {**FLAGS, "BLOCKS": 128}, {}),
    (sampling_kernels.sums_kernel, 4, {"BLOCK": 1024}, {"sums_ptr": "*fp64"}),
    (sampling_kernels.cut_kernel, 2, {"BLOCKS": 128, "GROUP": 128}, {"sums_ptr": "*fp64"}),
    (sampling_kernels.draw_kernel, 4, {"BLOCK": 1024}, {"ids_ptr": "*fp32"}),
    (sampling_kernels.combine_kernel, 1, {"BLOCKS": 128}, {"ids_ptr": "*fp32"}),
]


def main() -> None:
    for kernel, warps, constants, types in CASES:
        known = {n: TYPES.get(n, "i32") for n in kernel.arg_names if n not in constants} | types
        report = inspect(compile_kernel(kernel, known, constants, num_warps=warps))
        facts = {
            "kernel": kernel.__name__,
            "registers": report.registers,
            "stack": report.stack_bytes,
            "spills": report.spills,
            "shared": report.shared_bytes,
            "wide_loads": report.wide_loads,
            "byte_loads": report.byte_loads,
        }
        print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()

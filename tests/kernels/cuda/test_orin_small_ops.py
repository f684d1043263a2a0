"""The small kernels compiled for sm_87 without a GPU: no spills, shared memory, wide loads."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from machine_code import empty, reports

from edge_runtime.kernels.cuda import (
    activations,
    embedding,
    head,
    launch,
    ngram,
    sampling,
)
from edge_runtime.kernels.cuda.record import META
from edge_runtime.kernels.sampling import Parameters

# reads that matter are of a row of fp32 or int8 numbers
WIDE = {
    "quantise_kernel", "norm_quantise_kernel", "silu_mul_kernel", "quantise_chunks_kernel",
    "embed_kernel", "argmax_blocks_kernel", "peaks_kernel", "screen_kernel", "scores_kernel",
}  # fmt: skip
BYTES = {"decide_kernel"}  # a group of 128 tokens on 128 threads: one flag each
VOCABULARY = 128 * 1024


def launch_all() -> None:
    for K in (256, 1024, 4096, 8192, 16384, 32768):
        activations.quantise(empty(3, K), 64)
        activations.norm_quantise(empty(3, K), 1e-5, 64)
    activations.silu_mul_quantise(empty(3, 2 * 16384), 128)
    table, scale = empty(VOCABULARY, 4096, dtype=torch.int8), empty(VOCABULARY)
    for rows, kind in ((None, torch.int32), (empty(3, 4096), torch.int64)):
        embedding.embed(empty(3, dtype=kind), table, scale, rows)
    logits, allowed = empty(3, VOCABULARY), empty(VOCABULARY // 32, dtype=torch.int32)
    head.argmax(logits, VOCABULARY)
    head.argmax(logits, VOCABULARY, allowed)
    tokens, one = empty(32768, dtype=torch.int32), empty(1, dtype=torch.int32)
    ngram.look_up(tokens, one, one, one, 7)
    settings = sampling.Settings.of([Parameters()] * 3, [0] * 3, META)
    seen = empty(3, VOCABULARY, dtype=torch.uint8)
    for truncate in (False, True):
        for more in ({}, {"seen": seen, "allowed": allowed}):
            sampling.sample(logits, VOCABULARY, settings, truncate=truncate, **more)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_small_kernels_on_orin() -> None:
    found = reports(launch_all)
    assert len(found) > 20
    for signature, report in found.items():
        name = signature.kernel.rpartition(".")[2]
        assert report.registers <= 128, signature
        assert report.shared_bytes <= 164 * 1024, signature
        assert report.byte_loads == 0 or name in BYTES, signature
        assert report.wide_loads > 0 or name not in WIDE, signature


def test_numbers_without_triton() -> None:
    assert [launch.cdiv(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [launch.power_of_two(n) for n in (1, 2, 3, 4, 5, 1023, 1024)] == [
        1, 2, 4, 4, 8, 1024, 1024,
    ]  # fmt: skip

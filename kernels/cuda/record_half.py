"""What the 16-bit baseline and W8A8 with KV16 launch besides the nest, noted down like the rest."""

from __future__ import annotations

from typing import Any

import numpy as np

from edge_runtime.kernels import ops
from edge_runtime.kernels.cuda import half, launch, record, sizes
from edge_runtime.kernels.cuda.half_backend import HalfBackend, Kv16Backend
from edge_runtime.kernels.cuda.launch import ORIN, Signature


def baseline_signatures(
    subject: record.Subject, model: half.HalfModel, arch: int = ORIN
) -> list[Signature]:
    """Return what decoding in 16 bits launches with any context; prompts of many rows launch the
    same and torch's own. What cycles and choices need is the engine's (`engine_signatures`)."""
    recorder = record.Recorder(arch)
    with launch.using(recorder):
        weights = half.random_weights(model, record.META, model.dtype)
        for backend in (
            HalfBackend(weights, subject.geometry, record.META),
            Kv16Backend(record.blank_weights(subject, arch), subject.geometry, record.META),
        ):
            for capacity in record.capacities(subject.max_context):
                cache = backend.new_cache(capacity)
                for rows in range(1, min(capacity, sizes.SMALL_ROWS) + 1):
                    _run(backend, subject.programs["w8"][0], cache, rows)
    return list(recorder.signatures)


def _run(backend: Any, program: ops.Program, cache: Any, rows: int) -> None:
    """One pass at the end of the cache."""
    positions = np.arange(cache.capacity - rows, cache.capacity)
    batch = ops.Batch(
        ids=np.zeros(rows, np.int64),
        positions=positions,
        full_from=np.zeros(rows, np.int64),
        num_logits=min(rows, sizes.LOGIT_ROWS),
    )
    backend.run(program, batch, cache)

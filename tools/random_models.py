"""Models of a known shape with random weights, made on the GPU: nothing is read or converted."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from edge_runtime.cache.policy import KV8, KvPolicy
from edge_runtime.format.spec import ModelSpec
from edge_runtime.kernels import ops
from edge_runtime.kernels.cuda import half, sizes
from edge_runtime.kernels.cuda.backend import CudaBackend
from edge_runtime.kernels.cuda.half_backend import HalfBackend
from edge_runtime.kernels.cuda.linear import DeviceLinear
from edge_runtime.kernels.cuda.memory import pool, usual_device
from edge_runtime.kernels.cuda.timing import linears
from edge_runtime.kernels.cuda.weights import DeviceWeights
from edge_runtime.kernels.layout import MAX_GAMMA
from edge_runtime.model.rope import rope_tables
from edge_runtime.model.transformer import geometry, model_program
from edge_runtime.plan.footprint import half_shapes, linear_shapes

LEAST_CONTEXT = 288  # tokens that a cache has room for before what is decoded
SEGMENT = 100  # cycles that are run from one place in the context
ROW_SCALE = 0.05  # of what a linear adds to the residual stream, so that all layers stay finite


@dataclass(frozen=True)
class Model:
    """A backend with random weights, its programs and a cache filled with random tokens."""

    spec: ModelSpec
    backend: CudaBackend
    cache: Any
    policy: KvPolicy
    context: int  # tokens in the cache

    def program(self, view: ops.View) -> ops.Program:
        """Return the one program of a view."""
        return _PROGRAMS.setdefault((id(self), view), model_program(self.spec, view))

    @property
    def target(self) -> ops.View:
        """The view that is verified with."""
        return "fp" if isinstance(self.backend, HalfBackend) else "w8"

    def cycles(self) -> ops.Cycles:
        """Return cycles with the target's view."""
        target = self.program(self.target)
        draft = target if self.target == "fp" else self.program("w4")
        return self.backend.cycles(target, draft, self.cache, self.policy.recent)


_PROGRAMS: dict[tuple[int, ops.View], ops.Program] = {}


def random_weights(spec: ModelSpec, group: int, device: torch.device, tokens: int) -> DeviceWeights:
    """Make weights on the device: uniform planes, and scales that keep the numbers near one."""
    arch = pool(device).arch
    made: dict[str, DeviceLinear] = {}
    for name, (N, K) in linear_shapes(spec).items():
        w = linears.weights(N, K, sizes.row_tile(arch), group, device=str(device))
        w.mult.abs_().clamp_(1)
        if w.mult_rows is not None:
            w.mult_rows.abs_().clamp_(1)
        # codes of +-74 and +-45, multipliers of 19,000, as root mean squares; x_scale is near 1/40
        w.scale.fill_(ROW_SCALE / (math.sqrt(K) * 74 * 45 * 19_000 / 40))
        made[name] = w
    V, H = spec.vocab_size, spec.hidden_size
    cos, sin = (torch.from_numpy(t).to(device) for t in rope_tables(spec, tokens))
    norms = {
        f"layers.{i}.{which}_norm": torch.ones(spec.head_dim, device=device)
        for i in range(spec.num_layers if spec.qk_norm else 0)
        for which in "qk"
    }
    embedding = torch.randint(-127, 128, (V, H), dtype=torch.int8, device=device)
    tensors = [embedding, cos, sin, *norms.values()]
    for w in made.values():
        tensors += [w.base, w.refine, w.mult, w.scale]
    return DeviceWeights(
        linears=made,
        embedding=embedding,
        embedding_scale=torch.full((V,), 1 / 73, device=device),
        cos=cos,
        sin=sin,
        head_norms=norms,
        num_bytes=sum(t.nbytes for t in tensors),
    )


def room_for(context: int) -> int:
    """Tokens of a cache that has room for what follows the context."""
    return max(context, LEAST_CONTEXT) + SEGMENT * (MAX_GAMMA + 1)


def open_half(spec: ModelSpec, context: int) -> Model:
    """Make the unquantised model in 16 bits, random likewise."""
    device, room = usual_device(), room_for(context)
    cos, sin = rope_tables(spec, room)
    shapes = half.HalfModel(
        architecture=spec.architecture, shapes=half_shapes(spec), rows=lambda name: (), cos=cos,
        sin=sin,
    )  # fmt: skip
    weights = half.random_weights(shapes, device, shapes.dtype)
    backend = HalfBackend(weights, geometry(spec, spec.vocab_size), device)
    cache = backend.new_cache(room)
    for plane in (cache.key, cache.value):
        plane.normal_()
    return Model(spec, backend, cache, KV8, context)


def open_model(
    spec: ModelSpec, group: int, context: int, policy: KvPolicy, room: int | None = None
) -> Model:
    """Make a model whose cache holds `context` random tokens and has room for what follows, or for
    `room` tokens in all."""
    device, room = usual_device(), room or room_for(context)
    torch.manual_seed(0)
    weights = random_weights(spec, group, device, room)
    backend = CudaBackend(weights, geometry(spec, spec.vocab_size), device)
    cache = backend.new_cache(room)
    for plane in (cache.key_base, cache.key_refine, cache.value_base, cache.value_refine):
        plane.random_(0, 256)
    cache.scale.uniform_(0.02, 0.1)
    return Model(spec, backend, cache, policy, context)

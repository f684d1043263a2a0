"""Agreement of the views while converting: the same held-out tokens run four ways, layer by layer.

Invariant: original, target, draft and the W8 yardstick see the same tokens (teacher-forced) and the
same rotated weights; each view runs with its own activations and KV cache throughout (a draft that
runs for real reads the target's cache, so its acceptance is a little higher than what stands here).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from edge_runtime.convert import layer as layers
from edge_runtime.convert.nest import Nested, rtn8_linear
from edge_runtime.convert.rotate import FusedLayer
from edge_runtime.format.manifest import Agreement
from edge_runtime.format.spec import ModelSpec
from edge_runtime.kernels.ops import Geometry
from edge_runtime.kernels.reference import numeric
from edge_runtime.kernels.reference.float_ops import FloatBackend
from edge_runtime.kernels.reference.linear import ExactLinear
from edge_runtime.model.transformer import layer_program

HEAD_ROWS = 8192  # of the head in memory at once, in every view
VIEWS = ("original", "target", "draft", "w8_rtn")


class HeldOut:
    """Hidden states of the held-out windows in four views."""

    def __init__(
        self, spec: ModelSpec, one: Geometry, original: list[Tensor], quantised: list[Tensor]
    ) -> None:
        """original, quantised: embedded windows fp32 [L, H], unquantised and from int8 rows."""
        self._spec, self._one = spec, one
        self._length = original[0].shape[0]
        self._states = {v: list(original if v == "original" else quantised) for v in VIEWS}

    def layer(
        self,
        fused: FusedLayer,
        backend: FloatBackend,
        nested: Mapping[str, Nested],
        norms: dict[str, Tensor],
    ) -> None:
        """Move all views through one layer; nested, norms (of heads, as they are kept) and backend
        name what they hold "layers.0.…"."""
        layers.advance(backend, layer_program(self._spec, 0, "fp"), self._states["original"])
        G = next(iter(nested.values())).group_size
        weights, biases = layers.matrices(fused, "layers.0.")

        def advance(name: str, view: Literal["w8", "w4"], made: dict[str, ExactLinear]) -> None:
            quantised = layers.quantised_layer(
                made, norms, self._spec, self._one, self._length, view
            )
            layers.advance(quantised, layer_program(self._spec, 0, view), self._states[name])

        # one view in memory at a time
        advance("target", "w8", {n: m.linear("w8") for n, m in nested.items()})
        advance("draft", "w4", {n: m.linear("w4") for n, m in nested.items()})
        plain = {n: rtn8_linear(w, biases.get(n), G, n) for n, w in weights.items()}
        advance("w8_rtn", "w8", plain)

    def head(self, head: Tensor, nested: Nested) -> Agreement:
        """Compare the views' choices at every position. head: fp32 [V, H], rotated."""
        choices = {v: _Choices(self._spec, self._states[v]) for v in VIEWS}
        for a in range(0, self._one.num_tokens, HEAD_ROWS):
            rows = slice(a, min(a + HEAD_ROWS, self._one.num_tokens))
            part = nested.rows(rows)
            choices["original"].offer_float(a, head[rows])
            choices["target"].offer(a, part.linear("w8"))
            choices["draft"].offer(a, part.linear("w4"))
            choices["w8_rtn"].offer(a, rtn8_linear(head[rows], None, part.group_size, "head"))
        found = {v: c.ids for v, c in choices.items()}
        return Agreement(
            target_original=_share(found["target"], found["original"]),
            draft_target=_share(found["draft"], found["target"]),
            draft_original=_share(found["draft"], found["original"]),
            w8_rtn_original=_share(found["w8_rtn"], found["original"]),
            positions=len(found["original"]),
        )


class _Choices:
    """The winning id per position over a head that comes in blocks of rows."""

    def __init__(self, spec: ModelSpec, states: list[Tensor]) -> None:
        self._normed = numeric.rms_norm(torch.cat(states), spec.rms_norm_eps)
        self._codes, self._scale = numeric.quantise(self._normed)
        device = self._normed.device
        self._best = torch.full((len(self._normed),), -torch.inf, device=device)
        self.ids = torch.zeros(len(self._normed), dtype=torch.int64, device=device)

    def offer_float(self, first: int, rows: Tensor) -> None:
        """Take unquantised rows fp32 [n, H] with ids from `first`."""
        self._take(first, self._normed @ rows.T)

    def offer(self, first: int, linear: ExactLinear) -> None:
        """Take a block of the head in one view."""
        groups, G, _ = linear.codes.shape
        padding = groups * G - self._codes.shape[1]
        self._take(first, linear(torch.nn.functional.pad(self._codes, (0, padding)), self._scale))

    def _take(self, first: int, logits: Tensor) -> None:
        value, index = logits.max(-1)
        better = value > self._best
        self._best = torch.where(better, value, self._best)
        self.ids = torch.where(better, index + first, self.ids)


def _share(a: Tensor, b: Tensor) -> float:
    return round(float((a == b).double().mean()), 4)

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
from edge_runtime.kernels.reference.float_ops import FloatBackend, FloatWeights
from edge_runtime.kernels.reference.linear import ExactLinear
from edge_runtime.model.transformer import head_program, layer_program

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

    def layer(self, fused: FusedLayer, backend: FloatBackend, nested: Mapping[str, Nested]) -> None:
        """Move all views through one layer; nested and backend name its linears "layers.0.…"."""
        layers.advance(backend, layer_program(self._spec, 0, "fp"), self._states["original"])
        G = next(iter(nested.values())).group_size
        weights, biases = layers.matrices(fused, "layers.0.")
        linears: dict[str, tuple[Literal["w8", "w4"], dict[str, ExactLinear]]] = {
            "target": ("w8", {n: m.linear("w8") for n, m in nested.items()}),
            "draft": ("w4", {n: m.linear("w4") for n, m in nested.items()}),
            "w8_rtn": (
                "w8",
                {n: rtn8_linear(w, biases.get(n), G, n) for n, w in weights.items()},
            ),
        }
        norms = layers.head_norms(fused, "layers.0.")
        for name, (view, made) in linears.items():
            quantised = layers.quantised_layer(
                made, norms, self._spec, self._one, self._length, view
            )
            layers.advance(quantised, layer_program(self._spec, 0, view), self._states[name])

    def head(self, head: Tensor, nested: Nested) -> Agreement:
        """Compare the views' choices at every position. head: fp32 [V, H], rotated."""
        V = self._one.num_tokens
        floats = FloatBackend(
            FloatWeights(
                matrices={"head": head},
                embedding=torch.zeros(0),
                cos=torch.zeros(0),
                sin=torch.zeros(0),
            ),
            self._one,
        )
        choices = {"original": self._choices(floats, "original", "fp", V)}
        views: tuple[tuple[str, Literal["w8", "w4"], ExactLinear], ...] = (
            ("target", "w8", nested.linear("w8")),
            ("draft", "w4", nested.linear("w4")),
            ("w8_rtn", "w8", rtn8_linear(head, None, nested.group_size, "head")),
        )
        for name, view, linear in views:
            backend = layers.quantised_layer({"head": linear}, {}, self._spec, self._one, 1, view)
            choices[name] = self._choices(backend, name, view, V)
        return Agreement(
            target_original=_share(choices["target"], choices["original"]),
            draft_target=_share(choices["draft"], choices["target"]),
            draft_original=_share(choices["draft"], choices["original"]),
            w8_rtn_original=_share(choices["w8_rtn"], choices["original"]),
            positions=len(choices["original"]),
        )

    def _choices(
        self, backend: object, name: str, view: Literal["w8", "w4", "fp"], num_tokens: int
    ) -> Tensor:
        found = []
        for x in self._states[name]:
            registers = {"x": x}
            layers.run(backend, head_program(self._spec, view), registers)
            found.append(registers["logits"][:, :num_tokens].argmax(-1))
        return torch.cat(found)


def _share(a: Tensor, b: Tensor) -> float:
    return round(float((a == b).double().mean()), 4)

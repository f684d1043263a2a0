"""Even out the inputs of a feed-forward's second matrix, which no rotation reaches.

Invariant: the function of the layer does not change: input i of `down` is the product of a gate and
of row i of `up`, so that what row i is divided by is multiplied into column i of `down`. It costs
nothing at run time, and the codes of `up` stay as they are: a row has a scale of its own.

silu(gate) · up is spiky: the peak of a row is 10 times its root mean square, in some layers 27
times, against 3 for the inputs that R1 rotates (SmolLM2), and one scale serves all of a row.
Source: the scales of SmoothQuant (Xiao et al. 2023, arXiv 2211.10438) and AWQ (Lin et al. 2023,
arXiv 2306.00978), here from the Hessian's diagonal.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from edge_runtime.convert.rotate import FusedLayer

BALANCE = 0.5  # tools/LOG.md has the figures
MOST = 64.0  # that an input is scaled by, either way


def balanced(layer: FusedLayer, H: torch.Tensor, power: float) -> tuple[FusedLayer, torch.Tensor]:
    """Return the layer with inputs of `down` divided by (root mean square)^power, and their
    Hessian. H [F, F]: of the inputs as they are, any positive multiple. power 1: all alike."""
    size = H.diagonal().double().clamp_min(0).sqrt()
    live = size > 0
    if power == 0 or not bool(live.any()):
        return layer, H
    mean = size[live].log().mean().exp()
    scale = torch.where(live, size / mean, 1.0).clamp(1 / MOST, MOST) ** power
    rows = torch.cat([torch.ones_like(scale), scale])  # gate first
    bias = layer.gate_up_bias
    new = replace(
        layer,
        gate_up=(layer.gate_up.double() / rows[:, None]).float(),
        gate_up_bias=None if bias is None else (bias.double() / rows).float(),
        down=(layer.down.double() * scale).float(),
    )
    one = (1 / scale).to(H.dtype)
    return new, H * one * one[:, None]

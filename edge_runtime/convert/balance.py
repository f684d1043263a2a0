"""Even out what no rotation reaches: inputs of a feed-forward's second matrix, and keys.

Invariant: the function of the layer does not change, and it costs nothing at run time. Input i of
`down` is the product of a gate and of row i of `up`, so that what row i is divided by is multiplied
into column i of `down`. What a pair of key dimensions that RoPE turns is divided by is multiplied
into the queries that meet it. Codes of `up` and of `qkv` stay as they are: a row has a scale of its
own.

silu(gate) · up is spiky: the peak of a row is 10 times its root mean square, in some layers 27
times, against 3 for the inputs that R1 rotates (SmolLM2), and one scale serves all of a row.
Source: the scales of SmoothQuant (Xiao et al. 2023, arXiv 2211.10438) and AWQ (Lin et al. 2023,
arXiv 2306.00978), here from the Hessian's diagonal.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from edge_runtime.convert.rotate import FusedLayer
from edge_runtime.format.spec import ModelSpec

BALANCE = 0.5  # tools/LOG.md has the figures
MOST = 64.0  # that an input is scaled by, either way
LEAST_KEYS, MOST_KEYS = 2, 10  # two to it, of a key dimension; smaller ones gain nothing


def balanced_keys(layer: FusedLayer, H: torch.Tensor, spec: ModelSpec) -> FusedLayer:
    """Return the layer with queries and keys of one size, to a power of two, in those pairs
    (i, i + D/2) of a KV head that stand out; where heads are normalised, pairs of the norms.

    H fp32 [hidden, hidden]: of the inputs of `qkv`; their mean is taken to be 0 beside a bias.
    """
    D, half, q_size = spec.head_dim, spec.head_dim // 2, spec.q_size

    def factor(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """(k / q)^½ of a pair over that of most pairs, twice; q, k: squares [..., D]."""
        ratio = (k[..., :half] + k[..., half:]) / (q[..., :half] + q[..., half:])
        live = ratio.isfinite() & (ratio > 0)
        size = torch.where(live, ratio, 1.0).log2() / 4
        two_to = (size - size.median(-1, keepdim=True).values).round().clamp(-MOST_KEYS, MOST_KEYS)
        two_to = torch.where(live & (two_to.abs() >= LEAST_KEYS), two_to, 0.0)
        return torch.exp2(torch.cat([two_to, two_to], -1))

    if layer.q_norm is not None and layer.k_norm is not None:
        by = factor(layer.q_norm**2, layer.k_norm**2)
        return replace(layer, q_norm=layer.q_norm * by, k_norm=layer.k_norm / by)
    W, bias = layer.qkv[: q_size + spec.kv_size], layer.qkv_bias
    squares = ((W @ H) * W).sum(1)
    if bias is not None:
        squares += bias[: len(W)] ** 2
    q = squares[:q_size].view(spec.num_kv_heads, spec.group, D).mean(1)
    by = factor(q, squares[q_size:].view(spec.num_kv_heads, D))
    of_values = torch.ones(spec.kv_size, device=by.device)
    rows = torch.cat([by.repeat_interleave(spec.group, 0).ravel(), 1 / by.ravel(), of_values])
    new = layer.qkv * rows[:, None]
    return replace(layer, qkv=new, qkv_bias=None if bias is None else bias * rows)


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

"""Fold the norms and the rotations R1, R2 into a layer's weights and fuse its matrices.

Invariant: the function of the model does not change, only the basis of its residual stream (R1)
and of each value head (R2). Products are taken in fp64 and cast to fp32 once.

How: W_in ← W · diag(γ) · R1 for q, k, v, gate, up and the head; W_out ← R1ᵀ · W and b ← R1ᵀ · b
for o and down; per KV head v ← R2ᵀ · v, its bias too; per query head o ← o · R2. Biases of q, k,
gate and up stay, and so do the q/k norms, which act inside a head after the projection. γ becomes
one. RMSNorm needs no mean subtraction. A tied embedding is rotated twice, without and with the
final norm's γ, and so becomes two matrices. Source: bitnest paper, equation 4 (Fuse); the rules
are those of QuaRot and SpinQuant without the online rotations R3 and R4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from edge_runtime.convert.hadamard import Rotation
from edge_runtime.format.spec import ModelSpec

_CHUNK_ROWS = 4096


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class FusedLayer:
    """One layer ready to quantise, all fp32: norms folded in, rotated, matrices fused by rows.

    F = intermediate size, H = hidden size; gate rows come first in `gate_up`.
    """

    qkv: torch.Tensor  # [q_size + 2 · kv_size, H]
    qkv_bias: torch.Tensor | None
    o: torch.Tensor  # [H, q_size]
    o_bias: torch.Tensor | None
    gate_up: torch.Tensor  # [2F, H]
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor  # [H, F]
    down_bias: torch.Tensor | None
    q_norm: torch.Tensor | None  # [head_dim]
    k_norm: torch.Tensor | None


def fuse_layer(
    tensors: Mapping[str, torch.Tensor],
    spec: ModelSpec,
    r1: Rotation | None,
    r2: Rotation | None,
) -> FusedLayer:
    """Fold norms and rotations into one layer and fuse its matrices.

    `tensors` holds the layer's canonical short names (`attn_norm`, `q`, `q.bias`, …); which biases
    and norms must be there is the spec's word. r1 is [hidden, hidden], r2 is [head_dim, head_dim];
    None leaves that basis as it is.
    """
    assert r1 is None or r1.size == spec.hidden_size, "R1 does not fit the hidden size"
    assert r2 is None or r2.size == spec.head_dim, "R2 does not fit the head"
    R1 = None if r1 is None else r1.dense()
    R2 = None if r2 is None else r2.dense()
    attn_norm, mlp_norm = tensors["attn_norm"], tensors["mlp_norm"]
    qkv = [_rotate_input(tensors[n], attn_norm, R1) for n in ("q", "k")]
    # R2 first: it acts on rows, R1 on columns, and this way both products see the source's values
    qkv.append(_rotate_input(_rotate_value(tensors["v"], R2), attn_norm, R1))
    gate_up = [_rotate_input(tensors[n], mlp_norm, R1) for n in ("gate", "up")]
    qkv_bias = gate_up_bias = o_bias = down_bias = None
    if spec.qkv_bias:
        v_bias = _rotate_value(tensors["v.bias"][:, None], R2)[:, 0]
        qkv_bias = torch.cat([tensors["q.bias"].float(), tensors["k.bias"].float(), v_bias.float()])
    if spec.mlp_bias:
        gate_up_bias = torch.cat([tensors["gate.bias"].float(), tensors["up.bias"].float()])
        down_bias = _rotate_output(tensors["down.bias"][:, None], R1)[:, 0]
    if spec.o_bias:
        o_bias = _rotate_output(tensors["o.bias"][:, None], R1)[:, 0]
    return FusedLayer(
        qkv=torch.cat(qkv),
        qkv_bias=qkv_bias,
        o=_rotate_output(_rotate_heads(tensors["o"], R2), R1),
        o_bias=o_bias,
        gate_up=torch.cat(gate_up),
        gate_up_bias=gate_up_bias,
        down=_rotate_output(tensors["down"], R1),
        down_bias=down_bias,
        q_norm=tensors["q_norm"].float() if spec.qk_norm else None,
        k_norm=tensors["k_norm"].float() if spec.qk_norm else None,
    )


def rotate_embedding_rows(rows: torch.Tensor, r1: Rotation | None) -> torch.Tensor:
    """Return rows · R1 as fp32 [n, H]; the caller passes a large table in pieces or whole."""
    return _rotate_input(rows, None, None if r1 is None else r1.dense())


def rotate_head(head: torch.Tensor, final_norm: torch.Tensor, r1: Rotation | None) -> torch.Tensor:
    """Return head · diag(γ) · R1 as fp32 [V, H], γ = `final_norm` [H]."""
    return _rotate_input(head, final_norm, None if r1 is None else r1.dense())


def _rotate_input(
    W: torch.Tensor, gamma: torch.Tensor | None, R1: torch.Tensor | None
) -> torch.Tensor:
    """W [N, H] · diag(γ [H]) · R1, fp64 inside, fp32 out; a few thousand rows at a time."""
    out = torch.empty(W.shape, dtype=torch.float32, device=W.device)
    for i in range(0, W.shape[0], _CHUNK_ROWS):
        rows = W[i : i + _CHUNK_ROWS].double()
        if gamma is not None:
            rows = rows * gamma.double()
        out[i : i + _CHUNK_ROWS] = rows if R1 is None else rows @ R1
    return out


def _rotate_output(W: torch.Tensor, R1: torch.Tensor | None) -> torch.Tensor:
    """R1ᵀ · W [H, K], fp64 inside, fp32 out; a few thousand columns at a time."""
    out = torch.empty(W.shape, dtype=torch.float32, device=W.device)
    for i in range(0, W.shape[1], _CHUNK_ROWS):
        columns = W[:, i : i + _CHUNK_ROWS].double()
        out[:, i : i + _CHUNK_ROWS] = columns if R1 is None else R1.T @ columns
    return out


def _rotate_value(W: torch.Tensor, R2: torch.Tensor | None) -> torch.Tensor:
    """R2ᵀ · W per KV head, W [kv_size, n]; fp64 when rotated."""
    if R2 is None:
        return W
    return (R2.T @ W.double().reshape(-1, R2.shape[0], W.shape[1])).reshape(W.shape)


def _rotate_heads(W: torch.Tensor, R2: torch.Tensor | None) -> torch.Tensor:
    """W · R2 per query head, W [H, q_size]; fp64 when rotated."""
    if R2 is None:
        return W
    return (W.double().reshape(W.shape[0], -1, R2.shape[0]) @ R2).reshape(W.shape)

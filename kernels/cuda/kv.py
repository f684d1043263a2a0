"""RoPE, head norms, R3 and the quantised KV write on CUDA; bits of `kernels/reference/ops.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from edge_runtime.kernels.cuda.attention import softmax_scale
from edge_runtime.kernels.cuda.attention_tiles import padded_half
from edge_runtime.kernels.cuda.cache import LayerCache
from edge_runtime.kernels.cuda.launch import Kernel

rope_kv_kernel = Kernel("kv_kernels", "rope_kv", plain=(13, 14), pdl=True)


def rope_kv(
    qkv: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: LayerCache,
    out: Tensor,
    *,
    head_norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
    rotate_kv: bool = False,
) -> Tensor:
    """Split qkv, normalise heads if norms are given (qwen3), rotate q and k, write k and v.

    qkv: fp32 [M, (heads + 2·Hkv)·D]; positions: int32 [M], each its own; cos, sin: fp32
    [tokens, D/2]; out: fp32 [M, heads, D], the rotated q; head_norms: fp32 [D] of q and of k;
    rotate_kv: R3, for which D is a power of two. Source of the nesting: BitNest A.2.
    """
    M, heads, D = out.shape
    kv_heads, T = cache.key_scale.shape
    q_norm, k_norm = head_norms or (cos, cos)
    rope_kv_kernel[M, heads + 2 * kv_heads](
        qkv,
        positions,
        cos,
        sin,
        q_norm,
        k_norm,
        out,
        cache.key_base,
        cache.key_refine,
        cache.value_base,
        cache.value_refine,
        cache.key_scale.view(torch.int16),
        cache.value_scale.view(torch.int16),
        heads,
        kv_heads,
        T,
        eps,
        softmax_scale(D),
        D=D,
        HP=padded_half(D, "kv"),
        QK_NORM=head_norms is not None,
        ROTATE=rotate_kv,
        num_warps=1,
        enable_fp_fusion=False,
    )
    return out

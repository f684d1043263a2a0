"""What is timed: the sizes of a model, and calls with the bytes that they must move."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

ROWS = (1, 5, 8, 16)  # one token, verified drafts, a full tile of tokens
CACHE_TIMES = 3  # inputs are rotated through so many times the L2
MAX_COPIES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What of a model decides the time of its ops.

    linears: [out, in] of each fused linear of a layer and of the head, by name; tokens: in the
    cache that attention reads; rows: numbers of rows M of a pass.
    """

    linears: Mapping[str, tuple[int, int]]
    hidden: int
    inner: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_dim: int
    group_size: int = 128
    tokens: int = 4096
    rows: tuple[int, ...] = ROWS
    qk_norm: bool = False
    qkv_bias: bool = False
    device: str = "cuda"  # "cpu" in Triton's interpreter, where no figure means anything


@dataclass(frozen=True, slots=True)
class Entry:
    """call(i) runs the op on copy i of its inputs, of `num_copies`, on the current stream, and
    allocates nothing that it could be given; num_bytes: read and written, of one call.

    shape: as in "22016x4096"; kind: the view, policy or, of a peer, its name, as in "fp16". Entries
    of one name, shape and rows that follow each other are timed in turns and compared; of peers
    of one kind the fastest counts.
    """

    name: str
    rows: int
    call: Callable[[int], object]
    num_copies: int
    num_bytes: int
    shape: str = ""
    kind: str = ""
    peer: bool = False


def num_copies(num_bytes: int, device: str = "cuda") -> int:
    """Copies of inputs of this size that outgrow the L2 of the current GPU, 64 at most."""
    import torch

    if device == "cpu":
        return 2
    l2 = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return max(2, min(MAX_COPIES, -(-CACHE_TIMES * l2 // num_bytes)))

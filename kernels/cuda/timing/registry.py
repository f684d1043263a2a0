"""Which function times which op. Every op of `kernels/ops.py` is here, with its reason if none."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from edge_runtime.kernels import ops
from edge_runtime.kernels.cuda.timing import attention, linears, small
from edge_runtime.kernels.cuda.timing.entry import Entry, Sizes

SECTIONS: dict[str, tuple[Callable[[Sizes], Iterator[Entry]], ...]] = {
    "linear": (linears.entries,),
    "attention": (attention.entries,),
    "small": (
        small.embeddings,
        small.quantisers,
        small.rope,
        small.silu,
        small.choices,
        small.look_ups,
    ),
}
# the op's function and the name of its entries; those of linears are named after the matrix
OPS: dict[type[ops.Op], tuple[Callable[[Sizes], Iterator[Entry]], str]] = {
    ops.Embed: (small.embeddings, "embed"),
    ops.NormQuantise: (small.quantisers, "norm_quantise"),
    ops.Quantise: (small.quantisers, "quantise"),
    ops.Linear: (linears.entries, "qkv"),
    ops.Attention: (attention.entries, "attention"),
    ops.RopeKv: (small.rope, "rope_kv"),
    ops.SiluMulQuantise: (small.silu, "silu_mul_quantise"),
}
WITHOUT_KERNEL = {ops.SelectRows: "the last rows are a view of x: nothing is moved"}

"""A GGUF file as a `Source`: metadata -> spec, tensors dequantised one at a time, tokenizer.

Invariant: q and k rows leave here in the half-split order (i, i + D/2). Files of architecture
llama store them interleaved, pairs (2i, 2i + 1), per head; the qwen architectures do not.
"""

from __future__ import annotations

from pathlib import Path

import torch

from edge_runtime.convert.gguf_file import GgufFile, optional
from edge_runtime.convert.gguf_spec import check_type, dequantise, model_spec, need_gguf
from edge_runtime.convert.gguf_tokenizer import read_text
from edge_runtime.convert.hashing import sha256_of
from edge_runtime.convert.source import check_finite, refuse_impossible_depth, tensor_shapes
from edge_runtime.errors import CheckpointError, UnsupportedModel

_LAYER_PARTS = {
    "attn_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}


class GgufSource:
    """See `Source`. `path` is one file; raises CheckpointError or UnsupportedModel."""

    def __init__(self, path: Path) -> None:
        need_gguf()
        self.warnings: list[str] = []
        self._file = GgufFile(path)
        self.spec = model_spec(self._file)
        refuse_impossible_depth(self.spec, len(self._file.tensors), path.name)
        self._names = {name: _gguf_name(name) for name, _ in tensor_shapes(self.spec)}
        self._check_tensors()
        self.tokenizer_json, self.text, notes = read_text(
            self._file.metadata, self.spec.architecture, self.spec.vocab_size
        )
        self.warnings += notes
        self.provenance = {
            "kind": "gguf",
            "name": optional(self._file.metadata, "general.name", str) or path.stem,
            "file": path.name,
            "sha256": sha256_of(path),
            "path": str(path.resolve()),
        }

    def tensor(self, name: str) -> torch.Tensor:
        """Return one tensor as fp32, shaped as in `tensor_shapes`. NaN, inf: CheckpointError."""
        gguf_name = self._names[name]
        info = self._file.tensors[gguf_name]
        values = torch.from_numpy(dequantise(self._file, gguf_name)).reshape(info.shape)
        self._file.release()
        part = name.split(".")[2:3]
        if self.spec.architecture == "llama" and part in (["q"], ["k"]):
            heads = self.spec.num_heads if part == ["q"] else self.spec.num_kv_heads
            values = _half_split(values, heads)
        return check_finite(values, gguf_name, self._file.name)

    def close(self) -> None:
        """Release the file."""
        self._file.close()

    def _check_tensors(self) -> None:
        shapes = dict(tensor_shapes(self.spec))
        for name, shape in shapes.items():
            info = self._file.tensors.get(self._names[name])
            if info is None:
                raise CheckpointError(
                    f"{self._file.name}: tensor {self._names[name]} is missing, expected shape "
                    f"{list(shape)}",
                    "the file is not a complete model",
                )
            if info.shape != shape:
                raise CheckpointError(
                    f"{self._file.name}: tensor {self._names[name]}: expected shape {list(shape)}, "
                    f"got {list(info.shape)}",
                    "metadata and tensors do not belong together",
                )
            check_type(self._file.name, self._names[name], info.type)
        wanted = set(self._names.values()) | {"rope_freqs.weight"}
        for name, info in self._file.tensors.items():
            if name not in wanted:
                raise UnsupportedModel(
                    f"{self._file.name}: unknown tensor {name} of shape {list(info.shape)}: a "
                    f"{self.spec.architecture} model with this metadata has none"
                )


def _gguf_name(name: str) -> str:
    top = {"embed": "token_embd.weight", "norm": "output_norm.weight", "head": "output.weight"}
    if name in top:
        return top[name]
    _, layer, part, *bias = name.split(".")
    return f"blk.{layer}.{_LAYER_PARTS[part]}.{'bias' if bias else 'weight'}"


def _half_split(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder each head's rows from pairs (2i, 2i + 1) to pairs (i, i + D/2); [H·D, …] -> same."""
    paired = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return paired.transpose(1, 2).reshape(rows.shape).contiguous()

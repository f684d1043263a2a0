"""A Hugging Face folder as a `Source`: config.json, safetensors read one tensor at a time, text.

Invariant: the whole folder is checked when it is opened (names, shapes, dtypes, file lengths), so
that a conversion of an hour does not fail on its last tensor for a reason known at the start.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import msgspec
import safetensors
import torch

from edge_runtime.convert.hf_config import model_spec, read_json
from edge_runtime.convert.hf_text import read_text_assets
from edge_runtime.convert.safetensors_files import ELEMENT_BYTES, TensorInfo, find_tensors
from edge_runtime.convert.source import (
    check_finite,
    refuse_impossible_depth,
    tensor_shapes,
)
from edge_runtime.errors import CheckpointError, UnsupportedModel
from edge_runtime.format.spec import ModelSpec

_LAYER_PARTS = {
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
_BUFFERS = re.compile(r"(.*\.)?(rotary_emb\.(inv_freq|cos_cached|sin_cached)|masked_bias)")
_COMPARE_ROWS = 4096
_SAMPLES, _SAMPLE_BYTES = 33, 1 << 16  # of each file, for its identity


class HfSource:
    """See `Source`. `path` is the folder; raises CheckpointError or UnsupportedModel."""

    def __init__(self, path: Path) -> None:
        self.warnings: list[str] = []
        self._folder = path
        self._open: dict[str, Any] = {}
        config = read_json(path / "config.json")
        spec = model_spec(config)
        self._infos = find_tensors(path, self.warnings)
        refuse_impossible_depth(spec, len(self._infos), "config.json")
        base = "" if "embed_tokens.weight" in self._infos else "model."
        self._files = {name: _file_name(name, base) for name, _ in tensor_shapes(spec)}
        self.spec = self._settle_head(spec)
        self._check_tensors()
        self.tokenizer_json, self.text, notes = read_text_assets(path, config, self.spec.vocab_size)
        self.warnings += notes
        self.provenance = {
            "kind": "hf",
            "name": path.resolve().name,
            "files": ", ".join(sorted({info.file for info in self._infos.values()})),
            "sha256": self._digest(),
            "path": str(path.resolve()),
        }

    def tensor(self, name: str) -> torch.Tensor:
        """Return one tensor as fp32, shaped as in `tensor_shapes`. NaN, inf: CheckpointError."""
        file_name = self._files[name]
        info = self._infos[file_name]
        data: torch.Tensor = self._handle(info.file).get_tensor(file_name)
        # Copied even when it is fp32 already: the caller may write, and the file is closed, so that
        # its mapped pages are not counted as this process's memory.
        values = data.to(torch.float32, copy=True)
        del data
        self.close()
        return check_finite(values, file_name, info.file)

    def close(self) -> None:
        """Release the files."""
        self._open.clear()

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            try:
                opened = safetensors.safe_open(str(self._folder / file), framework="pt")
            except (safetensors.SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"{file} cannot be read: {error}", "download the file again"
                ) from None
            self._open[file] = opened
        return self._open[file]

    def _settle_head(self, spec: ModelSpec) -> ModelSpec:
        """Decide whether the head is tied: by the config, corrected by what the files hold."""
        embed, head = self._files["embed"], "lm_head.weight"
        if head not in self._infos:
            if not spec.tied_embedding:
                raise CheckpointError(
                    f"tensor {head} is missing: config.json says tie_word_embeddings = false",
                    "if the model ties its head to the embedding, set tie_word_embeddings to true",
                )
            return spec
        if not spec.tied_embedding:
            return spec
        if embed not in self._infos:
            self._files["embed"] = head  # a tied pair saved once, under the other name
            return spec
        if self._same(embed, head):
            return spec
        self.warnings.append(
            f"config.json ties the head to the embedding, but {head} differs from {embed}: "
            "the stored head is used"
        )
        self._files["head"] = head
        return msgspec.structs.replace(spec, tied_embedding=False)

    def _same(self, a: str, b: str) -> bool:
        if self._infos[a].shape != self._infos[b].shape:
            return False
        slices = [self._handle(self._infos[name].file).get_slice(name) for name in (a, b)]
        for row in range(0, self._infos[a].shape[0], _COMPARE_ROWS):
            x, y = (s[row : row + _COMPARE_ROWS].float() for s in slices)
            if not torch.equal(x, y):
                return False
        return True

    def _check_tensors(self) -> None:
        shapes = dict(tensor_shapes(self.spec))
        for name, shape in shapes.items():
            file_name = self._files[name]
            info = self._infos.get(file_name)
            if info is None:
                raise CheckpointError(
                    f"tensor {file_name} is missing: expected shape {list(shape)}",
                    "config.json and the weights do not belong together, or a file is missing",
                )
            _check_info(file_name, info, shape)
        wanted = {self._files[name] for name in shapes} | {"lm_head.weight"}
        for file_name, info in self._infos.items():
            if file_name not in wanted and not _BUFFERS.fullmatch(file_name):
                raise UnsupportedModel(
                    f"unknown tensor {file_name} of shape {list(info.shape)} in {info.file}: "
                    f"a {self.spec.architecture} model with this config.json has none",
                    "config.json and the weights do not belong together, or it is another model",
                )

    def _digest(self) -> str:
        """Identify the folder without reading gigabytes: config, tensor table, names, sizes and
        bytes sampled all over each file, to tell other weights of the same shapes apart."""
        digest = hashlib.sha256((self._folder / "config.json").read_bytes())
        for name in sorted({info.file for info in self._infos.values()}):
            path = self._folder / name
            size = path.stat().st_size
            digest.update(f"\n{name} {size}".encode())
            with path.open("rb") as file:
                for i in range(_SAMPLES):
                    file.seek(max(0, size - _SAMPLE_BYTES) * i // (_SAMPLES - 1))
                    digest.update(file.read(_SAMPLE_BYTES))
        for name in sorted(self._infos):
            digest.update(f"\n{name} {self._infos[name]}".encode())
        return digest.hexdigest()


def _file_name(name: str, base: str) -> str:
    """Canonical name -> the name in the files."""
    if name == "embed":
        return base + "embed_tokens.weight"
    if name == "norm":
        return base + "norm.weight"
    if name == "head":
        return "lm_head.weight"
    _, layer, part, *bias = name.split(".")
    file_name = f"{base}layers.{layer}.{_LAYER_PARTS[part]}"
    return file_name.removesuffix("weight") + "bias" if bias else file_name


def _check_info(name: str, info: TensorInfo, shape: tuple[int, ...]) -> None:
    if info.shape != shape:
        raise CheckpointError(
            f"tensor {name} in {info.file}: expected shape {list(shape)}, got {list(info.shape)}",
            "config.json and the weights do not belong together",
        )
    if info.dtype not in ELEMENT_BYTES:
        raise UnsupportedModel(
            f"tensor {name} in {info.file}: expected fp32, fp16 or bf16, got {info.dtype}",
            "convert from the original, unquantised model",
        )

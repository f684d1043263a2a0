"""A model to convert, whatever its files look like: spec, text assets, tensors by canonical name.

Invariant: after a `Source` is opened, every tensor that `tensor_names(spec)` lists exists exactly
once with the right shape; opening it refuses anything else by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from edge_runtime.errors import CheckpointError, UnsupportedModel
from edge_runtime.format.lfs import first_bytes, refuse_pointer
from edge_runtime.format.spec import ModelSpec, TextSpec

if TYPE_CHECKING:
    import torch


class Source(Protocol):
    """Names are canonical (see `tensor_shapes`); q and k rows pair dimensions (i, i + D/2)."""

    spec: ModelSpec
    text: TextSpec
    tokenizer_json: str
    provenance: dict[str, str]  # e.g. {"kind": "gguf", "file": NAME, "sha256": …}
    warnings: list[str]  # one line each: oddities that were resolved, e.g. a head that is not tied

    def tensor(self, name: str) -> torch.Tensor:
        """Return one tensor as fp32, shaped as in `tensor_shapes`. NaN, inf: CheckpointError."""
        ...

    def close(self) -> None:
        """Release the files."""
        ...


def tensor_shapes(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (canonical name, shape) of every tensor of a model, matrices as [out, in]."""
    H, F = spec.hidden_size, spec.intermediate_size
    yield "embed", (spec.vocab_size, H)
    for i in range(spec.num_layers):
        p = f"layers.{i}."
        yield p + "attn_norm", (H,)
        for name, rows in (("q", spec.q_size), ("k", spec.kv_size), ("v", spec.kv_size)):
            yield p + name, (rows, H)
            if spec.qkv_bias:
                yield p + name + ".bias", (rows,)
        if spec.qk_norm:
            yield p + "q_norm", (spec.head_dim,)
            yield p + "k_norm", (spec.head_dim,)
        yield p + "o", (H, spec.q_size)
        if spec.o_bias:
            yield p + "o.bias", (H,)
        yield p + "mlp_norm", (H,)
        for name, shape in (("gate", (F, H)), ("up", (F, H)), ("down", (H, F))):
            yield p + name, shape
            if spec.mlp_bias:
                yield p + name + ".bias", (shape[0],)
    yield "norm", (H,)
    if not spec.tied_embedding:
        yield "head", (spec.vocab_size, H)


def layer_tensors(spec: ModelSpec) -> list[str]:
    """Return the canonical short names of one layer's tensors."""
    prefix = "layers.0."
    return [n.removeprefix(prefix) for n, _ in tensor_shapes(spec) if n.startswith(prefix)]


def open_source(path: Path) -> Source:
    """Open a Hugging Face folder or a .gguf file. Raises CheckpointError or UnsupportedModel."""
    if not path.exists():
        raise CheckpointError(
            f"no model at {path}: expected a Hugging Face folder or a .gguf file",
            "a known model is fetched by name: bitnest-edge pull smollm2-135m",
        )
    if path.is_dir():
        return _open_folder(path)
    if path.is_file():
        refuse_pointer(path)
    if is_gguf(path) or (path.is_file() and path.suffix.lower() == ".gguf"):
        from edge_runtime.convert.source_gguf import GgufSource

        return GgufSource(path)
    if path.suffix == ".safetensors" or path.name == "config.json":
        hint = f"give the folder that holds it: {path.parent}"
    elif path.suffix in (".bin", ".pt", ".pth", ".ckpt"):
        hint = "pickle files can run code and are never opened; use a safetensors version"
    else:
        hint = "a Hugging Face folder has config.json and *.safetensors"
    raise CheckpointError(
        f"{path.name} is not a model: expected a Hugging Face folder or a .gguf file, "
        f"got {describe_file(path)}",
        hint,
    )


def _open_folder(path: Path) -> Source:
    if (path / "manifest.json").is_file():
        raise CheckpointError(
            f"{path} is already a nested checkpoint (it has manifest.json): nothing to convert",
            "run it as it is, or give the original model to convert again",
        )
    if (path / "config.json").is_file():
        from edge_runtime.convert.source_hf import HfSource

        return HfSource(path)
    if (path / "adapter_config.json").is_file():
        raise UnsupportedModel(
            f"{path} is a LoRA adapter: expected a whole model, got adapter_config.json",
            "merge the adapter into its base model first (peft: merge_and_unload)",
        )
    ggufs = sorted(p.name for p in path.glob("*.gguf"))
    if ggufs:
        hint = f"give one file: {path / ggufs[0]}"
    else:
        hint = "config.json lies next to the *.safetensors files; download the whole repository"
    raise CheckpointError(f"{path} has no config.json: expected a Hugging Face folder", hint)


def is_gguf(path: Path) -> bool:
    """Say whether a file begins as a GGUF file does, whatever its name."""
    return path.is_file() and first_bytes(path, 4) == b"GGUF"


def describe_file(path: Path) -> str:
    """Say what a file that is not what it should be seems to be, from its first bytes."""
    if not path.is_file():
        return "a device, a pipe or a socket"
    size = path.stat().st_size
    head = first_bytes(path, 512)
    text = head.lstrip().lower()
    if size == 0:
        return "an empty file"
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "a web page (the download link led to HTML, not to the file)"
    if text.startswith(b"{"):
        return "a JSON document"
    if head.startswith(b"GGUF"):
        return "a GGUF file"
    if head.startswith(b"PK\x03\x04"):
        return "a zip archive (perhaps a PyTorch pickle)"
    return f"{size} bytes beginning {head[:8].hex(' ')}"


def refuse_impossible_depth(spec: ModelSpec, num_tensors: int, where: str) -> None:
    """Raise CheckpointError for more layers than tensors, before anything loops over layers."""
    if spec.num_layers > num_tensors:
        raise CheckpointError(
            f"{where}: expected tensors for {spec.num_layers} layers, got {num_tensors} in all",
            "the configuration and the weights do not belong together",
        )


def check_finite(tensor: torch.Tensor, name: str, where: str) -> torch.Tensor:
    """Return `tensor`, or raise CheckpointError naming it when it holds NaN or infinity."""
    if tensor.numel() and not all(bool(end.isfinite()) for end in tensor.aminmax()):
        bad = int((~tensor.isfinite()).sum())
        raise CheckpointError(
            f"tensor {name} in {where}: expected finite numbers, got {bad} of {tensor.numel()} "
            "NaN or infinite",
            "the file is damaged or the model was saved after it diverged; download it again",
        )
    return tensor

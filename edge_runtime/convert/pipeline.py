"""Conversion: source -> rotated, nested checkpoint, one layer in memory at a time, resumable.

Invariant: a shard on disk is final; a stopped conversion continues with the first missing shard and
ends with the same planes as one that was never stopped. Steps: embed, each layer, head, manifest.
Peak memory: two layers (source and fused, fp32), the codes of one in two views, the embedding
or the head (fp32), and the hidden states of the calibration windows; on a GPU the same, with the
next layer of the source and the planes of two layers on the host (`resources.py`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edge_runtime import __version__
from edge_runtime.convert import device as devices
from edge_runtime.convert import layer as layers
from edge_runtime.convert import resources
from edge_runtime.convert.agreement import HeldOut
from edge_runtime.convert.balance import BALANCE, balanced, balanced_keys
from edge_runtime.convert.calibrate import (
    BUNDLED,
    WINDOW,
    HessianSum,
    calibration_documents,
    windows,
)
from edge_runtime.convert.hadamard import Rotation, random_rotation
from edge_runtime.convert.nest import Nested, Recipe, nest_matrix
from edge_runtime.convert.original import head_matrix, r2_seed
from edge_runtime.convert.rotate import FusedLayer, fuse_layer
from edge_runtime.convert.source import Source, layer_tensors
from edge_runtime.errors import UsageError
from edge_runtime.format import manifest as fmt
from edge_runtime.format.writer import CheckpointWriter, digest
from edge_runtime.kernels.layout import GROUP_SIZES
from edge_runtime.model.load import rotate_rows
from edge_runtime.model.transformer import geometry, layer_program
from edge_runtime.plan.footprint import usual_group_size
from edge_runtime.text.tokenizer import Tokenizer

Progress = Callable[[int, int, str], None]
HELD_OUT_WINDOWS = 2
EMBED_ROWS = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions:
    """What the user may choose. group_size None: the largest that divides every input size.

    r3 None: with rotation, where head_dim is a power of two (tools/LOG.md has the figures).
    """

    group_size: int | None = None
    rotate: Literal["hadamard", "none"] = "hadamard"
    base: Literal["gptq", "rtn"] = "gptq"
    refine: Literal["gptq", "closed"] = "gptq"
    bound: float | None = 0.25
    balance: float = BALANCE
    calibration: Path | None = None
    calibration_tokens: int = 72 * WINDOW
    r3: bool | None = None
    seed: int = 0


class Conversion:
    """One conversion; `run` does it all."""

    def __init__(
        self,
        source: Source,
        out: Path,
        options: ConvertOptions,
        progress: Progress,
        device: torch.device | str = "cpu",
    ) -> None:
        """Check disk and memory, open or continue the partial folder. Raises BudgetError.

        device: where all of it is computed but the embedding's codes.
        """
        spec = source.spec
        self.device = torch.device(device)
        self.source, self.spec, self.options, self._progress = source, spec, options, progress
        fmt.check_spec(spec, str(source.provenance.get("name", "source")))
        G = options.group_size or usual_group_size(spec)
        if G not in GROUP_SIZES:
            raise UsageError(f"group size: expected one of {GROUP_SIZES}, got {G}")
        power_of_two = spec.head_dim & (spec.head_dim - 1) == 0
        if options.r3 and not power_of_two:
            raise UsageError(f"R3 needs a head_dim that is a power of two, got {spec.head_dim}")
        rotate = options.rotate == "hadamard"
        self._r3 = rotate and power_of_two if options.r3 is None else options.r3
        self.recipe = Recipe(
            group_size=G, base=options.base, refine=options.refine, bound=options.bound
        )
        one = geometry(spec, source.text.num_tokens, rotate_kv=self._r3)
        self._one = replace(one, num_layers=1)
        self._r1 = random_rotation(spec.hidden_size, options.seed) if rotate else None
        self._calibration_name = (
            BUNDLED if options.calibration is None else options.calibration.name
        )
        resources.check_disk(spec, G, self._rotation().kind, out)
        resources.check_memory(spec, options.calibration_tokens, devices.room(self.device))
        self.writer = CheckpointWriter(out, self._identity())
        self.layer_seconds: list[float] = []  # of the layers that this run solved
        self._saver: ThreadPoolExecutor
        self._reader: ThreadPoolExecutor
        self._read_ahead: Future[dict[str, Tensor]] | None = None
        self._saved: Future[None] = Future()
        self._saved.set_result(None)
        self._tokenizer = Tokenizer.from_json(source.tokenizer_json)
        self._window = min(WINDOW, spec.max_position)
        self.shards = ["embed", *(f"layer-{i:03}" for i in range(spec.num_layers)), "head"]

    def _rotation(self) -> fmt.Rotation:
        if self._r1 is None:
            return fmt.Rotation(kind="none", r3=self._r3)
        return fmt.Rotation(kind=self._r1.kind, scale=self._r1.scale, r3=self._r3)

    def _identity(self) -> str:
        """Say what the planes depend on, files by their content: moving one changes nothing."""
        source, options = self.source, self.options
        documents = json.dumps(calibration_documents(options.calibration))
        identity = {
            **asdict(options),
            "group_size": self.recipe.group_size,
            "r3": self._r3,
            "calibration": digest(documents),
            "device": self.device.type,  # sums of another order: planes would not be those of one
            "source": source.provenance["sha256"],
            "tokenizer": digest(source.tokenizer_json),
            "text": digest(msgspec.json.encode(source.text).decode()),
            "format": fmt.VERSION,
            "program": __version__,
        }
        return json.dumps(identity)

    @torch.inference_mode()
    def run(self) -> fmt.Manifest:
        """Convert and return the manifest; what it stopped at can be continued at once."""
        try:
            with (
                ThreadPoolExecutor(1) as self._saver,  # left only when what it began is written
                ThreadPoolExecutor(1) as self._reader,
                devices.computing_on(self.device, self.spec, self.options.calibration_tokens),
            ):
                return self._run()
        finally:
            self.writer.close()

    def _run(self) -> fmt.Manifest:
        calibration, held_out = self._token_windows()
        self._progress(0, len(self.shards), "embedding")
        states, checked = self._embed(calibration, held_out)
        for i in range(self.spec.num_layers):
            self._progress(i + 1, len(self.shards), f"layer {i + 1} of {self.spec.num_layers}")
            started = time.perf_counter()
            if self._layer(i, states, checked):
                self.layer_seconds.append(time.perf_counter() - started)
            devices.release(self.device)
        self._progress(len(self.shards) - 1, len(self.shards), "LM head")
        agreement = self._head(states, checked)
        self._saved.result()
        rows = [row for shard in self.shards for row in self.writer.read_report(shard)]
        manifest = self._manifest(agreement, rows)
        self.writer.finish(manifest, self.source.tokenizer_json, rows)
        self._progress(len(self.shards), len(self.shards), "done")
        return manifest

    def _save(
        self,
        shard: str,
        matrices: dict[str, Nested],
        others: dict[str, npt.NDArray[Any]],
        rows: list[dict[str, Any]],
    ) -> None:
        """Pack and write a shard while the next one is computed, one at a time."""
        self._saved.result()
        here = {name: nested.cpu() for name, nested in matrices.items()}

        def save() -> None:
            planes = dict(others)
            for name, nested in here.items():
                planes |= nested.planes(name)
            self.writer.shard(shard, planes, rows)

        self._saved = self._saver.submit(save)

    def _token_windows(self) -> tuple[list[list[int]], list[list[int]]]:
        o, text = self.options, self.source.text

        def encode(document: str) -> list[int]:
            return self._tokenizer.encode(document, allow_special=False)

        encode_chat = None
        if text.chat_template is not None:
            from edge_runtime.text.template import ChatTemplate

            template = ChatTemplate(
                text.chat_template, bos_token=text.bos_token, eos_token=text.eos_token
            )

            def encode_chat(messages: list[dict[str, str]]) -> list[int]:
                return template.encode(self._tokenizer, messages, add_generation_prompt=False)

        count = max(1, o.calibration_tokens // self._window)
        documents = calibration_documents(o.calibration)
        found = windows(
            documents,
            encode,
            encode_chat,
            count + HELD_OUT_WINDOWS,
            length=self._window,
            seed=o.seed,
        )
        if len(found) <= HELD_OUT_WINDOWS:  # a very short text: measure on what there is
            return found, found
        return found[:-HELD_OUT_WINDOWS], found[-HELD_OUT_WINDOWS:]

    def _embed(
        self, calibration: list[list[int]], held_out: list[list[int]]
    ) -> tuple[list[Tensor], HeldOut]:
        table = self.source.tensor("embed")
        r1 = None if self._r1 is None else self._r1.matrix.numpy()
        scale = 1.0 if self._r1 is None else self._r1.scale
        if not self.writer.has("embed"):
            started = time.perf_counter()
            codes = np.empty(table.shape, dtype=np.int8)
            scales = np.empty(table.shape[0], dtype=np.float32)
            for a in range(0, table.shape[0], EMBED_ROWS):
                rows = table[a : a + EMBED_ROWS].numpy()
                codes[a : a + EMBED_ROWS], scales[a : a + EMBED_ROWS] = rotate_rows(rows, r1, scale)
            planes: dict[str, npt.NDArray[Any]] = {"embed.codes": codes, "embed.scale": scales}
            if r1 is not None:
                planes["r1"] = r1
            seconds = round(time.perf_counter() - started, 3)
            row = {"name": "embed", "shape": list(table.shape), "seconds": seconds}
            self._save("embed", {}, planes, [row])
        there = self._r1_there()
        dense = None if there is None else there.dense()

        def original(tokens: list[int]) -> Tensor:
            rows = table[tokens].to(self.device).double()
            return (rows if dense is None else rows @ dense).float()

        def quantised(tokens: list[int]) -> Tensor:
            codes, scales = rotate_rows(table[tokens].numpy(), r1, scale)
            return torch.from_numpy(codes.astype(np.float32) * scales[:, None]).to(self.device)

        checked = HeldOut(
            self.spec,
            self._one,
            [original(w) for w in held_out],
            [quantised(w) for w in held_out],
        )
        return [original(w) for w in calibration], checked

    def _layer(self, i: int, states: list[Tensor], checked: HeldOut) -> bool:
        """Take all states through a layer and return whether it had to be solved."""
        shard, p, local = f"layer-{i:03}", f"layers.{i}.", "layers.0."

        def full(name: str) -> str:
            return p + name.removeprefix(local)

        fused = self.fused_layer(i)
        backend = layers.float_layer(fused, self.spec, self._one, self._window)
        hessians = HessianSum()
        done = self.writer.has(shard)
        layers.advance(
            backend,
            layer_program(self.spec, 0, "fp"),
            states,
            None if done else hessians.observe,
        )
        nested: dict[str, Nested] = {}
        if done:
            planes = self.writer.read_shard(shard)
            for name in layers.matrices(fused, local)[0]:
                nested[name] = Nested.from_planes(
                    planes, full(name), self.recipe.group_size, self.device
                )
            kept = layers.head_norms(fused, local)
            norms = {n: torch.from_numpy(planes[full(n)]) for n in kept}
        else:
            rows = []
            taken = {local + n: hessians.take(local + n) for n in ("qkv", "down")}
            power, down = self.options.balance, local + "down"
            even = balanced_keys(fused, taken[local + "qkv"], self.spec) if power else fused
            even, taken[down] = balanced(even, taken[down], power)
            weights, biases = layers.matrices(even, local)
            for name, W in weights.items():
                H = taken.pop(name) if name in taken else hessians.take(name)
                nested[name], row = nest_matrix(W, biases.get(name), H, self.recipe, full(name))
                rows.append(row)
            norms = layers.head_norms(even, local)
            matrices = {full(n): m for n, m in nested.items()}
            self._save(shard, matrices, {full(n): w.cpu().numpy() for n, w in norms.items()}, rows)
        checked.layer(fused, backend, nested, norms)
        return not done

    def _head(self, states: list[Tensor], checked: HeldOut) -> fmt.Agreement:
        head = head_matrix(self.source, self._r1_there(), self.device)
        if self.writer.has("head"):
            nested = Nested.from_planes(
                self.writer.read_shard("head"), "head", self.recipe.group_size, self.device
            )
        else:
            hessians = HessianSum()
            for x in states:
                mean = (x * x).mean(-1, keepdim=True)
                hessians.observe("head", x * torch.rsqrt(mean + self.spec.rms_norm_eps))
            nested, row = nest_matrix(head, None, hessians.take("head"), self.recipe, "head")
            self._save("head", {"head": nested}, {}, [row])
        return checked.head(head, nested)

    def fused_layer(self, i: int) -> FusedLayer:
        """Read, fuse and rotate one layer of the source."""
        found = self._read(i) if self._read_ahead is None else self._read_ahead.result()
        tensors = {n: tensor.to(self.device) for n, tensor in found.items()}
        if self.device.type != "cpu" and i + 1 < self.spec.num_layers:  # it would wait for the disk
            self._read_ahead = self._reader.submit(self._read, i + 1)
        else:
            self._read_ahead = None
        r2 = None
        if self._r1 is not None:
            r2 = random_rotation(self.spec.head_dim, r2_seed(self.options.seed, i)).to(self.device)
        return fuse_layer(tensors, self.spec, self._r1_there(), r2)

    def _read(self, i: int) -> dict[str, Tensor]:
        return {n: self.source.tensor(f"layers.{i}.{n}") for n in layer_tensors(self.spec)}

    def _r1_there(self) -> Rotation | None:
        return None if self._r1 is None else self._r1.to(self.device)

    def _manifest(self, agreement: fmt.Agreement, rows: list[dict[str, Any]]) -> fmt.Manifest:
        o = self.options
        solved = [r for r in rows if "clipped_share" in r]
        weights = [r["shape"][0] * r["shape"][1] for r in solved]
        clipped = sum(r["clipped_share"] * w for r, w in zip(solved, weights, strict=True))
        manifest = fmt.Manifest(
            format=fmt.FORMAT,
            version=fmt.VERSION,
            spec=self.spec,
            text=self.source.text,
            group_size=self.recipe.group_size,
            rotation=self._rotation(),
            options=fmt.Options(
                base=o.base,
                refine=o.refine,
                bound=o.bound,
                balance=o.balance,
                seed=o.seed,
                calibration=self._calibration_name,
                calibration_tokens=o.calibration_tokens,
            ),
            provenance=self.source.provenance,
            tokenizer_sha256=digest(self.source.tokenizer_json),
            planes=self.writer.planes(self.shards),
            clipped_share=round(clipped / sum(weights), 5),
            agreement=agreement,
        )
        fmt.check_manifest(manifest, str(self.writer.partial))
        return manifest

"""A conversion on this GPU at the size of a known model: time, peaks, and where the time goes.

    python tools/convert_bars.py [llama-2-7b] [--only small,large] [--layers N] [--stop-s 150]
                                 [--tokens 12288] [--plain] [--folder /tmp/convert-bars]
                                 [--json FILE]

small: a random model of four layers is converted on the CPU and twice on the GPU; errors and
agreements of both must be alike, and the GPU's planes the same both times. large: random weights of
the shape in fp16 are written as shards by the GPU and converted in a process of its own, whose
peaks are those of the conversion; it stops at the layer that passes --stop-s and says what it had
done. --plain: without torch's compiler. Needs no network; packages that are missing have stand-ins
(`stand_ins.py`). The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import stand_ins
import torch

MISSING = stand_ins.install()

from edge_runtime.convert import (  # noqa: E402
    agreement,
    fused,
    gptq,
    nest,
    pipeline,
    quantize,
    resources,
)
from edge_runtime.convert import device as devices  # noqa: E402
from edge_runtime.convert import layer as layers  # noqa: E402
from edge_runtime.convert.source import open_source, tensor_shapes  # noqa: E402
from edge_runtime.convert.source_hf import _file_name  # noqa: E402
from edge_runtime.convert.synthetic_text import byte_tokenizer  # noqa: E402
from edge_runtime.format.spec import ModelSpec, RopeSpec  # noqa: E402
from edge_runtime.profiles.load import shape  # noqa: E402

SHARD_BYTES = 2 << 30
STEPS: tuple[tuple[Any, str], ...] = (
    (pipeline.Conversion, "fused_layer"), (layers, "advance"), (nest, "factor_hessian"),
    (quantize, "fit_scales"), (quantize, "solve_base"), (quantize, "solve_refine"),
    (quantize, "dequantize"), (quantize, "relative_error"), (pipeline.Conversion, "_save"),
    (agreement.HeldOut, "layer"),
)  # fmt: skip
SMALL = ModelSpec(
    architecture="llama", num_layers=4, hidden_size=512, intermediate_size=1408, num_heads=8,
    num_kv_heads=4, head_dim=64, vocab_size=2048, max_position=2048, rms_norm_eps=1e-5,
    rope=RopeSpec(), qkv_bias=False, o_bias=False, mlp_bias=False, qk_norm=False,
    tied_embedding=False,
)  # fmt: skip


class TimeUpError(Exception):
    """The conversion has to stop here."""


def write_model(spec: ModelSpec, folder: Path, device: torch.device) -> int:
    """Write random weights as a Hugging Face folder and return their bytes."""
    folder.mkdir(parents=True)
    config = {
        "model_type": spec.architecture, "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size, "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads, "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim, "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_position, "rms_norm_eps": spec.rms_norm_eps,
        "rope_theta": spec.rope.theta, "tie_word_embeddings": spec.tied_embedding,
        "eos_token_id": spec.vocab_size - 1,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(byte_tokenizer(spec.vocab_size)[1])
    shards: list[dict[str, tuple[str, tuple[int, ...]]]] = [{}]
    size = total = 0
    for name, dims in tensor_shapes(spec):
        if size > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][_file_name(name, "model.")] = ("float16", dims)
        size += math.prod(dims) * 2
        total += math.prod(dims) * 2
    places = {}
    generator = torch.Generator(device).manual_seed(0)
    for i, tensors in enumerate(shards, 1):
        file = f"model-{i:05}-of-{len(shards):05}.safetensors"
        places |= dict.fromkeys(tensors, file)
        stand_ins.write_safetensors(folder / file, tensors, _numbers(tensors, generator, device))
    index = {"weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def _numbers(
    tensors: Any, generator: torch.Generator, device: torch.device
) -> Iterator[np.ndarray]:
    """Yield matrices of normal numbers whose inputs differ in size, norms about one."""
    for _, dims in tensors.values():
        x = torch.randn(dims, generator=generator, device=device)
        if len(dims) == 1:
            x = 1 + 0.2 * x
        else:
            x *= torch.rand(dims[1], generator=generator, device=device).add_(0.5) / dims[1] ** 0.5
        yield x.half().cpu().numpy()


def convert(
    source: Path, out: Path, backend: str, tokens: int, progress: Callable[..., None]
) -> dict[str, Any]:
    """Convert a folder and return what it cost and kept, also when it had to stop."""
    opened = open_source(source)
    device, why = devices.choose(backend, opened.spec, tokens)
    options = pipeline.ConvertOptions(calibration_tokens=tokens)
    started, manifest = time.perf_counter(), None
    conversion = pipeline.Conversion(opened, out, options, progress, device)
    try:
        manifest = conversion.run()
    except TimeUpError:
        pass
    finally:
        opened.close()
    done = conversion.layer_seconds
    return {
        "backend": f"{device.type}: {why}",
        "finished": manifest is not None,
        "seconds": round(time.perf_counter() - started, 1),
        "layers": f"{len(done)} of {opened.spec.num_layers}",
        "seconds_per_layer": round(statistics.median(done), 3) if done else None,
        "device_peak_bytes": devices.peak_bytes(device),
        "device_planned_bytes": resources.device_bytes(opened.spec, tokens),
        "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "host_planned_bytes": resources.host_bytes(opened.spec),
        "compiled": gptq._choose._kernel not in (None, gptq._choose._steps),
        "agreement": None if manifest is None else vars_of(manifest.agreement),
        "clipped_share": None if manifest is None else manifest.clipped_share,
    }


def vars_of(value: Any) -> dict[str, Any]:
    """Return the fields of a struct."""
    return {name: getattr(value, name) for name in value.__struct_fields__}


def timed_steps() -> tuple[Counter[str], Counter[str]]:
    """Let the steps of a conversion add up their seconds, device included, by name, and keep the
    most bytes of tensors that there were on the device during one."""
    seconds: Counter[str] = Counter()
    most: Counter[str] = Counter()

    def wrap(owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def outer(*args: Any, **kwargs: Any) -> Any:
            torch.cuda.synchronize()
            torch.cuda.memory.reset_peak_memory_stats()
            started = time.perf_counter()
            result = inner(*args, **kwargs)
            torch.cuda.synchronize()
            step = f"{owner.__name__.rsplit('.')[-1]}.{name}"
            seconds[step] += time.perf_counter() - started
            most[step] = max(most[step], torch.cuda.max_memory_allocated())
            most["reserved"] = max(most["reserved"], torch.cuda.max_memory_reserved())
            return result

        setattr(owner, name, outer)

    for owner, name in STEPS:
        wrap(owner, name)
    return seconds, most


def child(args: argparse.Namespace) -> None:
    """Convert the large model in this process and print its document."""
    started = time.perf_counter()
    seconds, most = timed_steps()

    def progress(at: int, total: int, text: str) -> None:
        now = time.perf_counter() - started
        print(f"{now:7.1f} s  {text}", flush=True)
        if now > args.stop_s:
            raise TimeUpError

    document = convert(args.folder / "large", args.folder / "out", "cuda", args.tokens, progress)
    document["device_peak_bytes"] = max(most.pop("reserved"), document["device_peak_bytes"])
    document["allocated_bytes_by_step"] = dict(most.most_common())
    document["seconds_by_step"] = {n: round(s, 2) for n, s in seconds.most_common()}
    print(json.dumps(document))


def small(args: argparse.Namespace) -> dict[str, Any]:
    """Compare conversions of a small model."""
    source = args.folder / "small"
    write_model(SMALL, source, torch.device("cuda"))
    found, planes = {}, {}
    for name, backend in (("cpu", "cpu"), ("cuda", "cuda"), ("again", "cuda")):
        out = args.folder / f"small-{name}"
        found[name] = convert(source, out, backend, 4096, lambda *_: None)
        rows = json.loads((out / "report.json").read_text())[1:]
        for error in ("error_w4", "error_w8"):
            found[name][error] = statistics.fmean(row[error] for row in rows)
        manifest = json.loads((out / "manifest.json").read_text())
        planes[name] = {n: p["sha256"] for n, p in manifest["planes"].items()}
        print(f"small, {name}: {json.dumps(found[name])}", flush=True)
    here, there = found["cpu"], found["cuda"]
    errors = {e: there[e] / here[e] for e in ("error_w4", "error_w8")}
    moved = max(abs(there["agreement"][n] - a) for n, a in here["agreement"].items())
    return {
        "runs": found,
        "error_ratio": errors,
        "agreement_moved": moved,
        "as_good": all(abs(r - 1) < 0.02 for r in errors.values()) and moved < 0.03,
        "same_planes_twice": planes["cuda"] == planes["again"],
    }


def large(args: argparse.Namespace) -> dict[str, Any]:
    """Write and convert the large model."""
    spec = shape(args.name).spec
    if args.layers:
        spec = replace_layers(spec, args.layers)
    started = time.perf_counter()
    size = write_model(spec, args.folder / "large", torch.device("cuda"))
    seconds = time.perf_counter() - started
    print(f"{args.name}: {size / 1e9:.1f} GB written in {seconds:.1f} s", flush=True)
    torch.cuda.empty_cache()
    command = [sys.executable, __file__, args.name, "--child", "--folder", str(args.folder)]
    command += ["--tokens", str(args.tokens), "--stop-s", str(args.stop_s)]
    command += ["--plain"] * args.plain
    last = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            last = line
            print(line, end="", flush=True)
    if process.returncode:
        raise SystemExit(f"the conversion ended with {process.returncode}")
    return {"source_bytes": size, "write_seconds": round(seconds, 1), **json.loads(last)}


def replace_layers(spec: ModelSpec, num_layers: int) -> ModelSpec:
    """Return the shape with another number of layers."""
    import msgspec

    return msgspec.structs.replace(spec, num_layers=num_layers)


def main() -> int:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", nargs="?", default="llama-2-7b")
    parser.add_argument("--only", default="small,large")
    parser.add_argument("--layers", type=int, default=0, help="instead of the shape's own")
    parser.add_argument("--stop-s", type=float, default=150)
    parser.add_argument("--tokens", type=int, default=12288)
    parser.add_argument("--plain", action="store_true", help="without torch's compiler")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/convert-bars"))
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    logging.getLogger("edge_runtime.convert").setLevel(logging.DEBUG)
    if args.plain:
        fused.DEVICES = ()
    if args.child:
        child(args)
        return 0
    if not torch.cuda.is_available():
        print("convert_bars needs a GPU that torch can use", file=sys.stderr)
        return 4
    shutil.rmtree(args.folder, ignore_errors=True)
    print(f"stand-ins: {', '.join(MISSING) or 'none'}", flush=True)
    chosen = {"small": small, "large": large}
    document: dict[str, Any] = {"shape": args.name, "gpu": torch.cuda.get_device_name()}
    for name in args.only.split(","):
        document[name] = chosen[name](args)
    shutil.rmtree(args.folder, ignore_errors=True)
    text = json.dumps(document)
    if args.json:
        args.json.write_text(text + "\n")
    print(text)
    return 0 if document.get("small", {}).get("as_good", True) else 1


if __name__ == "__main__":
    sys.exit(main())

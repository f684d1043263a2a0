"""From the word a user typed for MODEL to an open engine.

Invariant: a converted folder is used as it is; a known name is fetched and converted once, into the
cache; an original model is never converted behind the user's back. What `auto` chose is said once;
why, with -v and in the documents.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edge_runtime import paths
from edge_runtime.cli.options import F, engine_options, prompt_cache_option, user_path
from edge_runtime.errors import CheckpointError, UsageError
from edge_runtime.format.lfs import refuse_pointer

if TYPE_CHECKING:
    from edge_runtime.convert.source import Source
    from edge_runtime.decode.engine import Engine
    from edge_runtime.format.manifest import Manifest
    from edge_runtime.format.reader import Checkpoint
    from edge_runtime.model.runner import Model

log = logging.getLogger(__name__)

CONVERTER = 1  # raise when conversion improves: first use then converts again
FLOAT_CONTEXT = 4096  # of --view fp with --ctx auto, where its cache is fp32

original_option = click.option(
    "--original",
    metavar="SRC",
    help="The unquantised model for --view fp.  [default: where the model was converted from]",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The shared options as click delivers them."""

    backend: str = "auto"
    view: str = "nest"
    draft: str = "auto"
    draft_source: str = "auto"
    kv_policy: str = "auto"
    ctx: str | int = "auto"
    budget: int | None = None
    reserve: int | None = None
    threads: int | None = None
    original: str | None = None
    prompt_cache: Path | None = None
    layout: str = "nest"  # no option: measurements compare others with it


def options_of_mode(mode: str, options: EngineOptions) -> EngineOptions:
    """Return how a mode of `profile` and `bench decode` opens its engine, as far as it is not the
    nest's: fp16, w8-kv16 or two-copy. Raises UsageError for one that the backend does not have."""
    from edge_runtime.measure.worker import LAYOUTS

    if mode == "fp16":
        backend = "reference" if options.backend == "cpu" else options.backend
        return replace(options, backend=backend, view="fp", draft="off", threads=None)
    if mode in LAYOUTS and options.backend not in ("auto", "cuda"):
        raise UsageError(
            f"mode {mode}: expected --backend cuda, got {options.backend}",
            "leave the mode out; it compares ways to hold a model on a GPU",
        )
    view = "w8" if mode == "w8-kv16" else options.view
    return replace(options, view=view, layout=LAYOUTS.get(mode, "nest"))


def run_options(command: F) -> F:
    """Add the options that arrive as the fields of `EngineOptions`."""
    return engine_options(prompt_cache_option(original_option(command)))


def open_model(name: str | None, options: EngineOptions) -> Engine:
    """Resolve a model, open it and say what was chosen."""
    from edge_runtime.format.reader import Checkpoint

    return open_checkpoint(Checkpoint(checkpoint_path(name)), options)


def open_checkpoint(checkpoint: Checkpoint, options: EngineOptions) -> Engine:
    """Open an engine on a checkpoint and say what was chosen."""
    open_ = _open_original if options.view == "fp" else _open
    engine = open_(checkpoint, options)
    if (synthetic := checkpoint.manifest.synthetic) is not None:
        engine.synthetic = True  # of --view fp too
        log.warning(
            "%s has random weights in the shape of %s: for speed and memory; its answers mean "
            "nothing",
            checkpoint.path.name,
            synthetic.shape,
        )
    d = engine.draft
    log.info(
        "%s · backend %s · view %s · %s · KV %s · context %d",
        checkpoint.path.name,
        engine.backend_name,
        engine.view,
        d,
        engine.policy,
        engine.context,
    )
    slow = options.backend == "auto" and options.view != "fp" and engine.backend_name == "reference"
    level = logging.WARNING if slow else logging.DEBUG
    log.log(level, "backend %s: %s", engine.backend_name, engine.backend_why)
    log.debug("draft %d %s: %s", d.gamma, d.source, d.why)
    return engine


def checkpoint_path(name: str | None) -> Path:
    """Return the converted folder of MODEL (None: the default), made on first use.

    Raises CheckpointError for a model that is not converted, and for no model at all.
    """
    name = "default" if name is None else name
    path = user_path(name)
    if path.exists():
        _refuse_original(path)
        return path
    if (partial := path.with_name(path.name + ".partial")).is_dir():
        raise CheckpointError(
            f"{path}: its conversion is not finished ({partial.name} is there)",
            "run the same convert command again: it continues",
        )
    if (key := known_name(name)) is None:
        raise _no_model(name)
    return _cached_checkpoint(key)


def source_path(name: str) -> Path:
    """Return the file or folder of an original model; a known name is fetched."""
    path = user_path(name)
    if path.exists():
        return path
    if known_name(name) is None:
        raise _no_model(name)
    from edge_runtime.cli.pull import ProgressLine
    from edge_runtime.convert.pull import pull

    progress = ProgressLine()
    try:
        return pull(name, progress=progress)
    finally:
        progress.close()


def known_name(name: str) -> str | None:
    """Return the canonical form of a name that `pull` knows for sure, or None. Raises UsageError.

    `org/name` could as well be a mistyped folder, so of the Hub only `hf:org/name` counts.
    """
    from edge_runtime.convert.pull import ALIASES, KNOWN, hub_model

    key = name.strip().lower()
    key = ALIASES.get(key, key)
    if key in KNOWN:
        return key
    if not key.startswith("hf:"):
        return None
    hub_model(name.strip())  # refuse what can be no repository before anything is announced
    return name.strip()


def _no_model(name: str) -> CheckpointError:
    from edge_runtime.convert.pull import KNOWN

    hint = f"known names: {', '.join(KNOWN)}"
    if name.count("/") == 1 and not name.startswith(("/", ".", "~")):
        hint = f"for a repository of the Hugging Face Hub write hf:{name}"
    return CheckpointError(f"no model at {name}, and no known model of that name", hint)


def _refuse_original(path: Path) -> None:
    """Raise CheckpointError for what is no converted model, with the line that makes it one."""
    from edge_runtime.convert.source import describe_file, is_gguf

    if path.name.endswith(".partial"):
        raise CheckpointError(
            f"{path}: a conversion that is not finished",
            "run the same convert command again: it continues",
        )
    if path.is_file():
        refuse_pointer(path)
        kind, can_convert = describe_file(path), is_gguf(path)
    elif (path / "config.json").is_file() and not (path / "manifest.json").is_file():
        kind, can_convert = "an unconverted Hugging Face folder", True
    elif path.is_dir():
        return
    else:
        kind, can_convert = describe_file(path), False
    hint = "it has manifest.json in it, and bitnest-edge convert makes it"
    if can_convert:
        out = path.absolute().name.removesuffix(".gguf") + "-nested"
        line = f"bitnest-edge convert {shlex.quote(str(path))} -o {shlex.quote(out)}"
        hint = f"convert it first: {line}"
    raise CheckpointError(f"{path}: expected the folder of a converted model, got {kind}", hint)


def known_checkpoint(key: str) -> Path | None:
    """Return the converted folder of a known name where there is one."""
    out = _checkpoint_folder(key)
    return out if (out / "manifest.json").is_file() else None


def _checkpoint_folder(key: str) -> Path:
    name = key.removeprefix("hf:").replace("/", "--")
    return paths.cache_dir() / "checkpoints" / f"{name}-v{CONVERTER}"


def _cached_checkpoint(key: str) -> Path:
    """Fetch and convert a known model, unless that was done before."""
    if (made := known_checkpoint(key)) is not None:
        return made
    out = _checkpoint_folder(key)
    folder = out.parent
    from edge_runtime.cli.convert import convert_model, report_lines, require_torch

    require_torch("converting a model on first use")
    from edge_runtime.convert.pipeline import ConvertOptions

    log.info("First use of %s: it is fetched and converted once.", key)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _only_one(folder / f".{out.name}.lock"):
            if not (out / "manifest.json").is_file():  # another process may just have made it
                done = convert_model(source_path(key), out, ConvertOptions())
                for line in report_lines(done, out):
                    log.info("%s", line)
    except OSError as error:
        raise paths.cache_error(folder, error) from None
    return out


@contextlib.contextmanager
def _only_one(lock: Path) -> Iterator[None]:
    """Wait for other processes that convert the same model."""
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("Another process converts this model; waiting for it.")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _open(checkpoint: Checkpoint, options: EngineOptions) -> Engine:
    from edge_runtime.decode.engine import Engine

    return Engine.open(
        checkpoint,
        backend=options.backend,
        view=options.view,
        draft=options.draft,
        draft_source=options.draft_source,
        kv_policy=options.kv_policy,
        ctx=options.ctx,
        budget_bytes=options.budget,
        reserve_bytes=options.reserve or 0,
        threads=options.threads,
        layout=options.layout,
    )


def _open_original(checkpoint: Checkpoint, options: EngineOptions) -> Engine:
    """Open the model a checkpoint was made from, unquantised, with the checkpoint's text."""
    from edge_runtime.cli.convert import require_torch

    require_torch("--view fp")
    backend, why = _float_backend(options.backend)
    from edge_runtime.decode.draft import choose_draft
    from edge_runtime.decode.engine import Engine
    from edge_runtime.decode.memory import fit_context
    from edge_runtime.text.tokenizer import Tokenizer

    manifest = checkpoint.manifest
    context = fit_context(
        manifest.spec, options.ctx, backend, options.budget, options.reserve or 0, view="fp"
    )
    if options.ctx == "auto" and backend == "reference":
        context = min(FLOAT_CONTEXT, context)
    draft = choose_draft(options.draft, options.draft_source, "fp", backend)
    model = _float_model(checkpoint, options.original, backend, context)
    if options.threads is not None:
        log.warning("--threads has no effect with --view fp")
    return Engine(
        model,
        Tokenizer.from_json(checkpoint.tokenizer_json(), manifest.text.eos_ids),
        manifest.text,
        view="fp",
        context=context,
        draft=draft,
        backend_why=why,
    )


def _float_backend(name: str) -> tuple[str, str]:
    """Return where the unquantised model runs, and why. Raises UsageError, BackendUnavailable."""
    from edge_runtime import kernels

    if name not in ("auto", "reference", "cuda"):
        raise UsageError(f"--view fp runs on the backends reference and cuda, got {name}")
    if name == "cuda":
        kernels.choose_backend(name)
    if name == "cuda" or (name == "auto" and kernels.cuda_status()[0]):
        return "cuda", "the unquantised model runs in 16 bits"
    return "reference", "the unquantised model runs in plain torch"


def _float_model(checkpoint: Checkpoint, original: str | None, backend: str, context: int) -> Model:
    from edge_runtime.convert import half
    from edge_runtime.convert.original import float_model

    manifest = checkpoint.manifest
    spec, num_tokens = manifest.spec, manifest.text.num_tokens
    if manifest.synthetic is not None and original is None and backend == "cuda":
        return half.open_model(
            half.from_planes(checkpoint.plane, manifest, context), spec, num_tokens
        )
    source = original_source(manifest, original)
    try:
        if backend == "cuda":
            return half.open_model(half.from_source(source, context), spec, num_tokens)
        return float_model(source, context)
    finally:
        source.close()


def original_source(manifest: Manifest, original: str | None) -> Source:
    """Open the model that a checkpoint was made from. Raises UsageError for another one."""
    from edge_runtime.convert.source import open_source

    source = open_source(_original_path(manifest, original))
    try:
        _check_same_model(source, manifest)
    except UsageError:
        source.close()
        raise
    return source


def _original_path(manifest: Manifest, original: str | None) -> Path:
    if original is not None:
        return source_path(original)
    recorded = manifest.provenance.get("path", "")
    if recorded and Path(recorded).exists():
        return Path(recorded)
    raise UsageError(
        "--view fp needs the unquantised model, and it is not where it was converted from"
        + (f" ({recorded})" if recorded else ""),
        "give it: --original SRC, a Hugging Face folder, a .gguf file or a known name",
    )


def _check_same_model(source: Source, manifest: Manifest) -> None:
    """Refuse another model; another file of the same model (a GGUF's own original) may be."""
    mine, theirs = manifest.spec, source.spec
    if (
        (mine.architecture, mine.num_layers, mine.hidden_size)
        != (theirs.architecture, theirs.num_layers, theirs.hidden_size)
    ) or manifest.text.num_tokens != source.text.num_tokens:
        raise UsageError(
            "--original is another model than the one this checkpoint was converted from",
            f"it was made from {manifest.provenance.get('path') or manifest.provenance}",
        )
    if source.provenance.get("sha256") != manifest.provenance.get("sha256"):
        log.warning("--original is another file than the one this checkpoint was converted from")

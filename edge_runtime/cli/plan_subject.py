"""From the word a user typed for MODEL to the shapes that are planned for; no weights are read.

Invariant: nothing is fetched or converted. A path that is there wins over a name.
"""

from __future__ import annotations

from pathlib import Path

from edge_runtime.errors import CheckpointError
from edge_runtime.format import manifest as fmt
from edge_runtime.plan.planner import Subject


def read_subject(name: str, path: Path) -> Subject:
    """Return the model: a checkpoint, Hugging Face folder or config.json, .gguf file, or a name.

    Raises CheckpointError for a file that is none of these, UsageError for an unknown name.
    """
    if path.is_dir():
        return _from_folder(path)
    if path.is_file():
        return _from_file(path)
    if path.exists() or "/" in name or path.suffix in (".gguf", ".json"):
        what = "is neither a file nor a folder" if path.exists() else "does not exist"
        raise CheckpointError(f"{path}: expected a model to plan for; it {what}")
    return _from_name(name)


def _from_folder(path: Path) -> Subject:
    if (path / fmt.MANIFEST).is_file():
        return _from_manifest(fmt.read_manifest(path), path.absolute().name)
    if (path / "config.json").is_file():
        return _from_config(path / "config.json")
    raise CheckpointError(
        f"{path}: expected {fmt.MANIFEST} or config.json in this folder, got neither",
        "give the folder of a converted model or of a Hugging Face model, or a .gguf file",
    )


def _from_file(path: Path) -> Subject:
    from edge_runtime.convert.source import describe_file, is_gguf

    if path.name == fmt.MANIFEST:
        return _from_manifest(fmt.read_manifest(path.parent), path.absolute().parent.name)
    if path.suffix == ".json":
        return _from_config(path)
    if is_gguf(path) or path.suffix.lower() == ".gguf":
        from edge_runtime.convert.gguf_file import GgufFile
        from edge_runtime.convert.gguf_spec import model_spec

        file = GgufFile(path)
        spec = model_spec(file)
        fmt.check_spec(spec, path.name)
        return Subject(name=path.stem, spec=spec)
    raise CheckpointError(
        f"{path}: expected config.json or a .gguf file, got {describe_file(path)}",
        "shapes are read from the config; of a folder, give the folder",
    )


def _from_manifest(manifest: fmt.Manifest, name: str) -> Subject:
    agreement = manifest.agreement
    return Subject(
        name=name,
        spec=manifest.spec,
        group_size=manifest.group_size,
        synthetic=manifest.synthetic is not None,
        acceptance=None if agreement is None else agreement.draft_target,
        acceptance_source=""
        if agreement is None
        else f"draft and target of this model at {agreement.positions} held-out positions, "
        "teacher-forced, while it was converted",
    )


def _from_config(path: Path) -> Subject:
    from edge_runtime.convert.hf_config import model_spec, read_json

    spec = model_spec(read_json(path))
    fmt.check_spec(spec, str(path))
    return Subject(name=path.absolute().parent.name, spec=spec)


def _from_name(name: str) -> Subject:
    from edge_runtime import profiles

    key = name.strip().lower()
    if key not in profiles.shape_names():
        from edge_runtime.cli.model import known_checkpoint, known_name

        if (known := known_name(name)) is not None:
            if (folder := known_checkpoint(known)) is not None:
                return _from_manifest(fmt.read_manifest(folder), known)
            if known in profiles.shape_names():
                key = known
            else:
                raise CheckpointError(
                    f"{name}: not on this machine, so its shapes are not known",
                    f"fetch it first: bitnest-edge pull {known}, then plan for the path it prints",
                )
    shape = profiles.shape(key)
    return Subject(name=shape.name, spec=shape.spec)

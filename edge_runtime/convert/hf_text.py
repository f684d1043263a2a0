"""The text side of a Hugging Face folder: tokenizer.json, chat template in any place, end tokens.

Invariant: the answer does not depend on which of the many historical layouts a folder uses.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers

from edge_runtime.convert.text_assets import make_text_spec
from edge_runtime.errors import CheckpointError
from edge_runtime.format.lfs import refuse_pointer
from edge_runtime.format.spec import TextSpec
from edge_runtime.text.tokenizer import load_tokenizer

Json = dict[str, Any]


def read_text_assets(
    folder: Path, config: Json, vocab_size: int
) -> tuple[str, TextSpec, list[str]]:
    """Return (tokenizer.json text, TextSpec, warnings). Raises CheckpointError."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        old = next((n for n in ("tokenizer.model", "vocab.json") if (folder / n).is_file()), None)
        hint = "download the whole repository"
        if old:
            hint = (
                f"only {old} is there: save it once with transformers, "
                "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
            )
        raise CheckpointError(f"{folder} has no tokenizer.json: expected the fast format", hint)
    refuse_pointer(path)
    tokenizer_json = path.read_text(encoding="utf-8", errors="replace")
    tokenizer = load_tokenizer(tokenizer_json, "tokenizer.json")
    settings = _optional_json(folder / "tokenizer_config.json")
    special = _optional_json(folder / "special_tokens_map.json")
    generation = _optional_json(folder / "generation_config.json")
    notes: list[str] = []
    template = chat_template(folder, settings)

    def named(key: str) -> list[int]:
        """Ids of tokenizer_config's token, falling back to special_tokens_map's."""
        text = _token_text(settings.get(key)) or _token_text(special.get(key))
        token_id = tokenizer.token_to_id(text) if text else None
        return [token_id] if token_id is not None else []

    eos = [*named("eos_token"), *_ids(config, "eos_token_id"), *_ids(generation, "eos_token_id")]
    bos = [*named("bos_token"), *_ids(config, "bos_token_id"), *_ids(generation, "bos_token_id")]
    pad = [*named("pad_token"), *_ids(config, "pad_token_id"), *_ids(generation, "pad_token_id")]
    bos_id = bos[0] if bos else None
    text = make_text_spec(
        tokenizer,
        declared_eos=eos,
        pad_id=pad[0] if pad else None,
        bos_id=bos_id,
        add_bos=_adds_bos(tokenizer, settings, bos_id),
        chat_template=template,
        vocab_size=vocab_size,
    )
    if not text.eos_ids:
        notes.append("no end-of-text token is declared: answers stop only at their length limit")
    return tokenizer_json, text, notes


def chat_template(folder: Path, settings: Json) -> str | None:
    """Find the chat template: its own .jinja file, chat_template.json, or tokenizer_config.json."""
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        refuse_pointer(jinja)
        try:
            return jinja.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{jinja.name} is not UTF-8 text ({error})") from None
    found = _optional_json(folder / "chat_template.json").get("chat_template")
    if found is None:
        found = settings.get("chat_template")
    if isinstance(found, list):  # several named templates
        named = {str(t.get("name")): t.get("template") for t in found if isinstance(t, dict)}
        found = named.get("default") or (next(iter(named.values())) if len(named) == 1 else None)
    return found if isinstance(found, str) and found else None


def _adds_bos(tokenizer: tokenizers.Tokenizer, settings: Json, bos_id: int | None) -> bool:
    declared = settings.get("add_bos_token")
    if isinstance(declared, bool):
        return declared
    if bos_id is None:
        return False
    return list(tokenizer.encode("a").ids[:1]) == [bos_id]  # what its post-processor does


def _ids(config: Json, key: str) -> list[int]:
    value = config.get(key)
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool)]


def _token_text(value: Any) -> str:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _optional_json(path: Path) -> Json:
    if not path.is_file():
        return {}
    refuse_pointer(path)
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path.name} is not JSON ({error})", "download it again, or delete it"
        ) from None
    return value if isinstance(value, dict) else {}

"""GGUF files: equality with the same model as a folder, refusals, tokenizers, the real model."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import tokenizers
import torch

from edge_runtime.convert.ggml_types import TYPES
from edge_runtime.convert.source import open_source, tensor_shapes
from edge_runtime.errors import CheckpointError
from edge_runtime.format.spec import RopeSpec
from edge_runtime.text.tokenizer import Tokenizer

pytest.importorskip("gguf")

CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    ("qwen2", {"rope_theta": 1000000.0}),
    ("qwen3", {"head_dim": 32, "attention_bias": True}),
]


def test_the_types_are_those_of_the_gguf_package() -> None:
    from gguf.constants import GGML_QUANT_SIZES

    theirs = {int(kind): (kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}
    assert {kind: known for kind, known in TYPES.items() if kind in theirs} == theirs


@pytest.mark.parametrize(("architecture", "overrides"), CASES)
def test_same_model_as_the_folder(
    tmp_path: Path, architecture: str, overrides: dict[str, Any]
) -> None:
    file = open_source(tiny_models.write_gguf(tmp_path / "m.gguf", architecture, **overrides))
    folder = open_source(tiny_models.write_hf(tmp_path / "m", architecture, **overrides))
    assert file.spec == folder.spec
    for name, _ in tensor_shapes(file.spec):
        assert torch.equal(file.tensor(name), folder.tensor(name)), name
    assert file.text == folder.text
    file.close()


@pytest.mark.parametrize("quant", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantised_types_dequantise_as_the_package_does(tmp_path: Path, quant: str) -> None:
    import gguf

    path = tiny_models.write_gguf(tmp_path / "m.gguf", "qwen2", quant=quant)
    source = open_source(path)
    data = tiny_models.hf_tensors(tiny_models.hf_config("qwen2"))["model.embed_tokens.weight"]
    kind = gguf.GGMLQuantizationType[quant]
    blocks = gguf.quants.quantize(data.numpy(), kind)
    expected = torch.from_numpy(np.array(gguf.quants.dequantize(blocks, kind)))
    assert torch.equal(source.tensor("embed"), expected)


# ---- RoPE


def _rope(tmp_path: Path, metadata: dict[str, Any], **overrides: Any) -> RopeSpec:
    path = tiny_models.write_gguf(tmp_path / "m.gguf", metadata=metadata, **overrides)
    return open_source(path).spec.rope


def test_rope_scaling_in_the_metadata(tmp_path: Path) -> None:
    assert _rope(tmp_path, {"rope.scaling.type": "none"}) == RopeSpec()
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    assert _rope(tmp_path, linear) == RopeSpec(kind="linear", factor=4.0)
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
    yarn |= {"rope.scaling.original_context_length": 64}
    expected = RopeSpec(kind="yarn", factor=4.0, original_max_position=64)
    assert _rope(tmp_path, yarn) == expected
    with pytest.raises(CheckpointError, match="longrope"):
        _rope(tmp_path, {"rope.scaling.type": "longrope", "rope.scaling.factor": 4.0})


def _llama3_table(head_dim: int, theta: float, factor: float) -> torch.Tensor:
    """Divisors as llama.cpp's converter writes them, from the published definition."""
    table = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * theta ** (i / head_dim)
        if wavelength < 8192 / 4:
            table.append(1.0)
        elif wavelength > 8192:
            table.append(factor)
        else:
            smooth = (8192 / wavelength - 1.0) / 3.0
            table.append(1.0 / ((1.0 - smooth) / factor + smooth))
    return torch.tensor(table, dtype=torch.float32)


def test_llama3_scaling_is_recovered_from_the_divisors(tmp_path: Path) -> None:
    table = _llama3_table(64, 500000.0, 32.0)
    assert ((table > 1) & (table < 32)).any()
    shape = {"head_dim": 64, "rope_theta": 500000.0}
    rope = _rope(tmp_path, {}, extra={"rope_freqs.weight": table}, **shape)
    assert rope == RopeSpec(
        kind="llama3",
        theta=500000.0,
        factor=32.0,
        original_max_position=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )
    table[20] *= 1.01
    with pytest.raises(CheckpointError, match="rope_freqs"):
        _rope(tmp_path, {}, extra={"rope_freqs.weight": table}, **shape)


# ---- refusals


def _refused(path: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_source(path)
    assert "\n" not in caught.value.message
    for word in words:
        assert word in caught.value.message, caught.value.message


@pytest.mark.parametrize(
    ("metadata", "word"),
    [
        ({"expert_count": 8}, "llama.expert_count"),
        ({"attention.sliding_window": 4096}, "attention.sliding_window"),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": -1.0}, "rope.scaling.factor"),
    ],
)
def test_unknown_options_are_named(tmp_path: Path, metadata: dict[str, Any], word: str) -> None:
    _refused(tiny_models.write_gguf(tmp_path / "m.gguf", metadata=metadata), word)


def test_an_option_that_is_off_is_fine(tmp_path: Path) -> None:
    open_source(tiny_models.write_gguf(tmp_path / "m.gguf", metadata={"expert_count": 0})).close()


def test_missing_and_unknown_tensors(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    data = tiny_models.write_gguf(path).read_bytes()
    renamed = data.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xp.weight")
    path.write_bytes(renamed)
    _refused(path, "blk.1.ffn_up.weight", "missing")
    tiny_models.write_gguf(path, extra={"blk.0.attn_sinks.weight": torch.zeros(4)})
    _refused(path, "unknown tensor blk.0.attn_sinks.weight")
    path.write_bytes(data.replace(b"llama", b"gemma"))
    _refused(path, "'gemma'")


def test_not_finite_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    data = tiny_models.write_gguf(path).read_bytes()
    path.write_bytes(data[:-4] + struct.pack("<f", float("nan")))  # lm_head is written last
    source = open_source(path)
    with pytest.raises(CheckpointError, match=r"output\.weight"):
        source.tensor("head")


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "Git LFS"),
        (b"<!DOCTYPE html>\n<html><body>Not found</body></html>", "web page"),
        (b"", "empty"),
        (b"GGUF", "GGUF"),
        (b"GGML" + bytes(40), "not a GGUF"),
    ],
)
def test_other_things_named_gguf(tmp_path: Path, content: bytes, word: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    _refused(path, word)


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _header(
    *,
    version: int = 3,
    tensors: int = 1,
    values: int = 1,
    alignment: int = 32,
    dims: int = 1,
    size: int = 8,
    kind: int = 0,
    offset: int = 0,
    name_bytes: int | None = None,
) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, tensors, values)
    head += _string("general.alignment") + struct.pack("<II", 4, alignment)
    name = _string("t") if name_bytes is None else struct.pack("<Q", name_bytes) + b"t"
    head += name + struct.pack("<I", dims) + struct.pack("<Q", size) * min(dims, 8)
    head += struct.pack("<IQ", kind, offset)
    return head.ljust(-(-len(head) // 32) * 32, b"\0") + bytes(64)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"version": 1}, "version 1"),
        ({"version": 99}, "version 99"),
        ({"version": 3 << 24}, "big-endian"),
        ({"tensors": 1 << 60}, "tensor count"),
        ({"values": 1 << 60}, "metadata count"),
        ({"alignment": 0}, "general.alignment"),
        ({"alignment": 24}, "general.alignment"),
        ({"dims": 0}, "dimensions"),
        ({"dims": 9}, "dimensions"),
        ({"size": 0}, "shape [0]"),
        ({"size": 1 << 62}, "truncated"),
        ({"kind": 999}, "ggml type 999"),
        ({"kind": 8}, "blocks of 32"),
        ({"offset": 5}, "unaligned"),
        ({"offset": 1 << 40}, "truncated"),
        ({"name_bytes": 1 << 50}, "truncated"),
    ],
)
def test_mutated_headers(tmp_path: Path, changes: dict[str, int], word: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(_header())
    _refused(path, "architecture None")  # the container itself is fine
    path.write_bytes(_header(**changes))
    _refused(path, word)


def test_any_truncation_is_an_error_of_its_kind(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    data = tiny_models.write_gguf(path).read_bytes()
    for size in [*range(0, 400, 7), 5000, 20000, len(data) // 2, len(data) - 1]:
        path.write_bytes(data[:size])
        with pytest.raises(CheckpointError):
            open_source(path)


# ---- tokenizers


def test_bpe_equals_the_folder_s_tokenizer(tmp_path: Path) -> None:
    source = open_source(tiny_models.write_gguf(tmp_path / "m.gguf"))
    mine = tokenizers.Tokenizer.from_str(source.tokenizer_json)
    theirs = tokenizers.Tokenizer.from_str(tiny_models.tokenizer_json())
    for text in ("hello world", " the  world\n\ning", "<|im_start|>hi<|im_end|>", "é 你 🙂", ""):
        assert mine.encode(text).ids == theirs.encode(text).ids
        assert mine.decode(mine.encode(text).ids) == theirs.decode(theirs.encode(text).ids)


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "I'm  12 ab!\n\nx", ["I", "'m", "Ġ", "Ġ12", "Ġab", "!", "Ċ", "Ċ", "x"]),
        ("smollm", "a  12 b", ["a", "ĠĠ", "1", "2", "Ġb"]),
        ("llama-bpe", "I'M 12345 a!\n\n x", ["I", "'M", "Ġ", "123", "45", "Ġa", "!ĊĊ", "Ġx"]),
        ("qwen2", "I'M 12 a!\n\n x", ["I", "'M", "Ġ", "1", "2", "Ġa", "!ĊĊ", "Ġx"]),
    ],
)
def test_pre_tokenizers(tmp_path: Path, pre: str, text: str, pieces: list[str]) -> None:
    source = open_source(tiny_models.write_gguf(tmp_path / "m.gguf", pre=pre))
    splitter = tokenizers.Tokenizer.from_str(source.tokenizer_json).pre_tokenizer
    assert [piece for piece, _ in splitter.pre_tokenize_str(text)] == pieces


def test_unknown_and_missing_pre_tokenizer(tmp_path: Path) -> None:
    _refused(tiny_models.write_gguf(tmp_path / "a.gguf", pre="tekken"), "'tekken'")
    source = open_source(tiny_models.write_gguf(tmp_path / "b.gguf", "qwen2", pre=None))
    assert "qwen2" in source.warnings[0]


def test_padding_tokens_do_not_count(tmp_path: Path) -> None:
    source = open_source(tiny_models.write_gguf(tmp_path / "m.gguf", padding=43))
    assert source.text.num_tokens == 277
    assert source.spec.vocab_size == 320


def _sentencepiece(text: str) -> list[int]:
    """SentencePiece's BPE, slowly: merge the best-scored adjacent pair, leftmost first."""
    tokens, scores, types = tiny_models.spm_tokens()
    ids = {t: i for i, t in enumerate(tokens)}
    parts = list(("▁" + text.replace(" ", "▁")) if text else "")
    while True:
        best: tuple[float, int] | None = None
        for at in range(len(parts) - 1):
            i = ids.get(parts[at] + parts[at + 1])
            if i is not None and types[i] == 1 and (best is None or scores[i] > best[0]):
                best = (scores[i], at)
        if best is None:
            break
        parts[best[1] : best[1] + 2] = [parts[best[1]] + parts[best[1] + 1]]
    out: list[int] = []
    for part in parts:
        known = ids.get(part)
        out += [known] if known is not None else [ids[f"<0x{b:02X}>"] for b in part.encode()]
    return out


def test_sentencepiece_from_scores(tmp_path: Path) -> None:
    source = open_source(tiny_models.write_gguf(tmp_path / "m.gguf", tokenizer="llama"))
    assert (source.text.add_bos, source.text.bos_id, source.text.eos_ids) == (True, 1, (2,))
    tokenizer = Tokenizer.from_json(source.tokenizer_json)
    for text in ("hello world", " hello", "world   ing", "hellohello é🙂 Z", "a\nb", ""):
        ids = tokenizer.encode(text, allow_special=True)
        assert ids == _sentencepiece(text)
        assert tokenizer.decode(ids) == text


# ---- the real model

TEXTS = (
    "def f(x: int) -> str:\n    return f'{x:>8}'\n\n\nclass A:\n\tpass\n",
    "I'm sure we'll DON'T 3.14159 and 12,345 + 2**10",
    "🤷🏽‍♀️ naïve café — “quotes” … 👩‍👩‍👧‍👦",
    "你好 世界。 مرحبا بالعالم नमस्ते दुनिया Привет Καλημέρα 日本語テキスト",
    "a   b\t\tc \n \n  d    ",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "\r\n\x00\u200b\ufeff",
    " ",
    "",
)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_smollm2_tokenizer_equals_transformers(smollm2_gguf: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(
        smollm2_gguf.parent, gguf_file=smollm2_gguf.name
    )
    mine = Tokenizer.from_json(open_source(smollm2_gguf).tokenizer_json)
    for text in TEXTS:
        ids = mine.encode(text, allow_special=True)
        assert ids == theirs.encode(text, add_special_tokens=False), text
        assert mine.decode(ids, skip_special=False) == theirs.decode(ids)
    # transformers ignores tokenizer.ggml.pre: it keeps a space and a digit in one piece. The
    # model's own tokenizer (and llama.cpp) splits digits off first, so here we differ on purpose.
    ids = mine.encode("x =  3", allow_special=False)
    assert [mine.decode([i]) for i in ids] == ["x", " =", "  ", "3"]


@pytest.mark.model
def test_smollm2_spec_and_text(smollm2_gguf: Path) -> None:
    source = open_source(smollm2_gguf)
    spec, text = source.spec, source.text
    assert (spec.num_layers, spec.hidden_size, spec.num_heads, spec.head_dim) == (30, 576, 9, 64)
    assert (spec.rope, spec.tied_embedding) == (RopeSpec(theta=100000.0), True)
    assert (text.eos_ids, text.bos_id, text.add_bos, text.num_tokens) == ((2,), 1, False, 49152)
    assert source.provenance["sha256"].startswith("b179c9523d0e6a0f")


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_smollm2_tensors_equal_transformers(smollm2_gguf: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="transformers loads GGUF only with accelerate")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.float32
    )
    state = model.state_dict()
    source = open_source(smollm2_gguf)
    names = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight"}
    for i in range(source.spec.num_layers):
        p, q = f"layers.{i}.", f"model.layers.{i}."
        names |= {p + part: f"{q}self_attn.{part}_proj.weight" for part in "qkvo"}
        names |= {p + part: f"{q}mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
        names[p + "attn_norm"] = q + "input_layernorm.weight"
        names[p + "mlp_norm"] = q + "post_attention_layernorm.weight"
    for name, _ in tensor_shapes(source.spec):
        assert torch.equal(source.tensor(name), state[names[name]]), name

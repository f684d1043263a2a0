"""What a model is: its shapes and the few switches of its architecture, frozen and strict.

Invariant: this is the only model configuration in the program. Sources (Hugging Face, GGUF)
translate into it, the checkpoint manifest stores it, and nothing later looks at the source again.
"""

from __future__ import annotations

from typing import Literal

import msgspec

ARCHITECTURES = ("llama", "qwen2", "qwen3")
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


class RopeSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rotary position embedding; half-split pairs (i, i + D/2) after loading, always.

    Fields not used by `kind` keep their defaults. Names are those of the Hugging Face configs.
    """

    kind: Literal["default", "linear", "dynamic", "llama3", "yarn"] = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decoder-only transformer: RMSNorm, rotary attention, grouped KV heads, gated SiLU MLP."""

    architecture: Literal["llama", "qwen2", "qwen3"]
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int  # rows of the embedding, padding included
    max_position: int
    rms_norm_eps: float
    rope: RopeSpec = RopeSpec()
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied_embedding: bool = False  # of the source; a checkpoint always holds both matrices

    @property
    def q_size(self) -> int:
        """Rows of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of the key (or value) projection."""
        return self.num_kv_heads * self.head_dim

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads


class TextSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the program must know about text besides `tokenizer.json`.

    `eos_ids` is the union of the model config's, the generation config's and the chat template's
    end tokens. `chat_template` is Jinja source or None (plain completion only). `num_tokens` is
    the tokenizer's size: ids at or above it are padding rows that must never be chosen.
    """

    eos_ids: tuple[int, ...]
    num_tokens: int
    bos_id: int | None = None
    add_bos: bool = False
    bos_token: str = ""
    eos_token: str = ""
    chat_template: str | None = None

"""GPT-2: learned positions; the checkpoint stores weights transposed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final, Literal

import msgspec
from msgspec import field
from msgspec.structs import replace

from aioengine.families._block_config import AttentionConfig, BlockConfig, MlpConfig, NormConfig, TensorNames
from aioengine.families._config import DecoderConfig, DecoderFamily, Task
from aioengine.families._rope_config import RopeConfig

UNREAD: Final = "num_key_value_heads", "head_dim", "rope_theta", "rope_scaling", "rope_parameters"
"""transformers ignores these fields: each head has its own keys and values, and positions are learned."""

_SIZES: Final = "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"


class Gpt2Family(DecoderFamily, frozen=True, kw_only=True):
    unread = UNREAD
    tasks: ClassVar[Mapping[str, Task]] = {
        "LMHeadModel": Task.GENERATE,
        "ForSequenceClassification": Task.CLASSIFY,
        "Model": Task.EMBED,
    }
    names = TensorNames(
        embedding="transformer.wte", positions="transformer.wpe", layers="transformer.h", norm="transformer.ln_f"
    )
    prefix = "transformer."
    norm = NormConfig(kind="layer", has_bias=True)
    block = BlockConfig(attention="attn.", attention_norm="ln_1", mlp_norm="ln_2")
    attention_bias = True
    mlp = MlpConfig(first=("c_fc",), second="c_proj", is_gated=False)
    mlp_bias = True
    is_transposed = True
    buffers = (".attn.bias", ".attn.masked_bias")

    vocab_size: int = 50_257
    hidden_size: int = field(default=768, name="n_embd")
    intermediate_size: int = field(name="n_inner")
    num_hidden_layers: int = field(default=12, name="n_layer")
    num_attention_heads: int = field(default=12, name="n_head")
    max_position_embeddings: int = field(default=1024, name="n_positions")
    hidden_act: str = field(default="gelu_new", name="activation_function")
    rms_norm_eps: float = field(default=1e-5, name="layer_norm_epsilon")
    tie_word_embeddings: bool = True
    is_scaled: bool = field(default=True, name="scale_attn_weights")
    is_scaled_by_layer: Literal[False] = field(default=False, name="scale_attn_by_inverse_layer_idx")
    add_cross_attention: Literal[False] = False

    @classmethod
    def read(cls, config: Mapping[str, object]) -> DecoderConfig:
        """Read config.json, which may use the usual names of sizes. The default of ``n_inner`` is 4 * ``n_embd``."""
        sizes = {field.name: field for field in msgspec.structs.fields(cls) if field.name in _SIZES}
        usual = {field.encode_name: config[name] for name, field in sizes.items() if name in config}
        fields = {**usual, **config}
        size = fields.get("n_embd", sizes["hidden_size"].default)
        if fields.get("n_inner") is None:
            fields["n_inner"] = 4 * size if isinstance(size, int) else None
        return super().read(fields)

    @property
    def attention(self) -> AttentionConfig:
        return AttentionConfig(qkv=("c_attn",), output="c_proj", scale=None if self.is_scaled else 1.0)

    @property
    def layer_ropes(self) -> tuple[RopeConfig | None, ...]:
        return (None,) * self.num_hidden_layers if self.names.positions else ()


class GptBigCodeFamily(Gpt2Family, frozen=True, kw_only=True):
    """GPT-BigCode (StarCoder, SantaCoder): GPT-2 with multi-query attention."""

    tasks = DecoderFamily.tasks
    is_transposed = False

    hidden_act: str = field(default="gelu_pytorch_tanh", name="activation_function")
    multi_query: bool = True

    @property
    def num_kv_heads(self) -> int:
        return 1 if self.multi_query else self.num_attention_heads

    @property
    def attention(self) -> AttentionConfig:
        return replace(super().attention, is_grouped=self.num_kv_heads > 1)


class GptJFamily(Gpt2Family, frozen=True, kw_only=True):
    """GPT-J: parallel attention and MLP, interleaved rotary embedding on a part of each head."""

    tasks = DecoderFamily.tasks
    names = replace(Gpt2Family.names, positions="")
    block = BlockConfig(attention="attn.", attention_norm="ln_1", mlp_norm="", is_parallel=True)
    attention_bias = False
    is_transposed = False
    head_bias = True
    mlp = replace(Gpt2Family.mlp, first=("fc_in",), second="fc_out")

    vocab_size: int = 50_400
    hidden_size: int = field(default=4096, name="n_embd")
    num_hidden_layers: int = field(default=28, name="n_layer")
    num_attention_heads: int = field(default=16, name="n_head")
    max_position_embeddings: int = field(default=2048, name="n_positions")
    tie_word_embeddings: bool = False
    rotary_dim: Annotated[int, msgspec.Meta(ge=1)] | None = 64

    @property
    def attention(self) -> AttentionConfig:
        return AttentionConfig(output="out_proj", is_interleaved=True)

    @property
    def rope(self) -> RopeConfig:
        return RopeConfig(partial_rotary_factor=1.0 if self.rotary_dim is None else self.rotary_dim / self.head_size)


PLUGIN = Gpt2Family

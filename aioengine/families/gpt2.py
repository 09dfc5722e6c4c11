"""GPT-2: learned positions; the checkpoint has its weights with inputs first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import msgspec
from msgspec.structs import replace

from aioengine.families._block_config import AttentionConfig, BlockConfig, NormConfig, TensorNames
from aioengine.families._config import FamilyConfig, RopeConfig, Task, decode_config

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.families._config import DecoderConfig


TASKS: Final = {
    "LMHeadModel": Task.GENERATE,
    "ForSequenceClassification": Task.CLASSIFY,
    "Model": Task.EMBED,
}


_SIZES: Final = "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"


class Config(FamilyConfig, frozen=True, kw_only=True):
    tasks = TASKS

    vocab_size: int = 50_257
    hidden_size: int = msgspec.field(default=768, name="n_embd")
    intermediate_size: int = msgspec.field(name="n_inner")
    num_hidden_layers: int = msgspec.field(default=12, name="n_layer")
    num_attention_heads: int = msgspec.field(default=12, name="n_head")
    max_position_embeddings: int = msgspec.field(default=1024, name="n_positions")
    hidden_act: str = msgspec.field(default="gelu_new", name="activation_function")
    rms_norm_eps: float = msgspec.field(default=1e-5, name="layer_norm_epsilon")
    tie_word_embeddings: bool = True
    is_scaled: bool = msgspec.field(default=True, name="scale_attn_weights")
    is_scaled_by_layer: Literal[False] = msgspec.field(default=False, name="scale_attn_by_inverse_layer_idx")
    add_cross_attention: Literal[False] = False

    @property
    def num_kv_heads(self) -> int:
        """All heads have keys and values of their own, whatever ``num_key_value_heads`` says."""
        return self.num_attention_heads

    @property
    def head_size(self) -> int:
        """The heads divide the size of the model, whatever ``head_dim`` says."""
        return self.hidden_size // self.num_attention_heads


def read(config: Mapping[str, object]) -> DecoderConfig:
    return gpt2_decoder(decode_config(own_names(config, Config), Config))


def own_names(config: Mapping[str, object], config_type: type[Config]) -> dict[str, object]:
    """config.json with the names of GPT-2 for sizes that have their usual ones, and with the inner size."""
    sizes = {field.name: field for field in msgspec.structs.fields(config_type) if field.name in _SIZES}
    usual = {field.encode_name: config[name] for name, field in sizes.items() if name in config}
    found = {**usual, **config}
    size = found.get("n_embd", sizes["hidden_size"].default)
    if found.get("n_inner") is None:
        found["n_inner"] = 4 * size if isinstance(size, int) else None
    return found


def gpt2_decoder(found: Config) -> DecoderConfig:
    """The decoder of GPT-2, from which those of GPT-BigCode and GPT-J are made."""
    decoder = found.decoder(RopeConfig())
    return replace(
        decoder,
        names=TensorNames(
            embedding="transformer.wte", positions="transformer.wpe", layers="transformer.h", norm="transformer.ln_f"
        ),
        prefix="transformer.",
        norm=NormConfig(kind="layer", has_bias=True),
        block=BlockConfig(attention="attn.", attention_norm="ln_1", mlp_norm="ln_2"),
        attention=AttentionConfig(
            qkv=("c_attn",),
            output="c_proj",
            qkv_bias=True,
            output_bias=True,
            scale=None if found.is_scaled else 1.0,
        ),
        mlp=replace(decoder.mlp, first=("c_fc",), second="c_proj", is_gated=False, has_bias=True),
        is_transposed=True,
        layer_ropes=(None,) * decoder.num_layers,
        buffers=(".attn.bias", ".attn.masked_bias"),
    )


PLUGIN = read

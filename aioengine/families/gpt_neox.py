"""GPT-NeoX and Pythia: attention and MLP side by side with a norm each, a part of each head is rotated."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

import msgspec
from msgspec.structs import replace

from aioengine.families._block_config import AttentionConfig, BlockConfig, NormConfig, TensorNames
from aioengine.families._config import FamilyConfig, decode_config, read_rope

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.families._config import DecoderConfig


PARTS: Final = "embed_in", "layers", "final_layer_norm"
"""Files of a model without its head name them so."""


class Config(FamilyConfig, frozen=True, kw_only=True):
    default_partial: ClassVar[float | None] = 0.25

    hidden_act: str = "gelu"
    rms_norm_eps: float = msgspec.field(default=1e-5, name="layer_norm_eps")
    rotary_pct: float | None = None
    rotary_emb_base: float | None = None
    use_parallel_residual: bool = True
    attention_bias: bool = True

    @property
    def num_kv_heads(self) -> int:
        """All heads have keys and values of their own, whatever ``num_key_value_heads`` says."""
        return self.num_attention_heads


def read(config: Mapping[str, object]) -> DecoderConfig:
    found = decode_config(config, Config)
    base = found.default_theta if found.rotary_emb_base is None else found.rotary_emb_base  # whatever rope_theta is
    partial = found.default_partial if found.rotary_pct is None else found.rotary_pct
    decoder = found.decoder(read_rope({**config, "rope_theta": base}, partial=partial))
    return replace(
        decoder,
        names=TensorNames(embedding="gpt_neox.embed_in", layers="gpt_neox.layers", norm="gpt_neox.final_layer_norm"),
        prefix="gpt_neox.",
        renamed=(("embed_out.", "lm_head."), *((f"{name}.", f"gpt_neox.{name}.") for name in PARTS)),
        norm=NormConfig(kind="layer", has_bias=True),
        block=BlockConfig(attention="attention.", is_parallel=found.use_parallel_residual),
        attention=AttentionConfig(
            qkv=("query_key_value",),
            is_grouped=True,
            output="dense",
            qkv_bias=found.attention_bias,
            output_bias=found.attention_bias,
        ),
        mlp=replace(decoder.mlp, first=("dense_h_to_4h",), second="dense_4h_to_h", is_gated=False, has_bias=True),
        buffers=("rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias"),
    )


PLUGIN = read

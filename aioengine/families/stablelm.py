"""StableLM: LayerNorm and partial rotary embedding."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from aioengine.families._block_config import BlockConfig, HeadNorm, NormConfig
from aioengine.families._config import DecoderConfig, DecoderFamily


class StableLmFamily(DecoderFamily, frozen=True, kw_only=True):
    default_partial = 0.25
    norm = NormConfig(kind="layer", has_bias=True)

    num_key_value_heads: int | None = 32
    rms_norm_eps: float = msgspec.field(default=1e-5, name="layer_norm_eps")
    max_position_embeddings: int = 4096
    qkv_bias: bool = msgspec.field(default=False, name="use_qkv_bias")
    qk_layernorm: bool = False
    use_parallel_residual: bool = False

    def decoder(self) -> DecoderConfig:
        decoder = super().decoder()
        if self.use_parallel_residual:
            decoder = replace(decoder, block=BlockConfig(is_parallel=True, mlp_norm=""))
        if self.qk_layernorm:
            head_norm = HeadNorm(names=("q_layernorm", "k_layernorm"), norm=NormConfig(kind="layer"), extent="list")
            decoder = replace(decoder, attention=replace(decoder.attention, head_norm=head_norm))
        return decoder


PLUGIN = StableLmFamily

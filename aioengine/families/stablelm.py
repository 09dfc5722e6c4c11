"""StableLM: LayerNorm and partial rotary embedding."""

from __future__ import annotations

from msgspec import field

from aioengine.families._block_config import AttentionConfig, BlockConfig, HeadNorm, NormConfig
from aioengine.families._config import DecoderFamily


class StableLmFamily(DecoderFamily, frozen=True, kw_only=True):
    default_partial = 0.25
    norm = NormConfig(kind="layer", has_bias=True)

    num_key_value_heads: int | None = 32
    rms_norm_eps: float = field(default=1e-5, name="layer_norm_eps")
    max_position_embeddings: int = 4096
    qkv_bias: bool = field(default=False, name="use_qkv_bias")
    qk_layernorm: bool = False
    use_parallel_residual: bool = False

    @property
    def block(self) -> BlockConfig:
        return BlockConfig(is_parallel=True, mlp_norm="") if self.use_parallel_residual else BlockConfig()

    @property
    def attention(self) -> AttentionConfig:
        head_norm = HeadNorm(names=("q_layernorm", "k_layernorm"), norm=NormConfig(kind="layer"), extent="list")
        return AttentionConfig(head_norm=head_norm if self.qk_layernorm else None)


PLUGIN = StableLmFamily

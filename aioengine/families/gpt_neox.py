"""GPT-NeoX and Pythia: parallel attention and MLP with separate norms, partial rotary embedding."""

from __future__ import annotations

from msgspec import field

from aioengine.families._block_config import AttentionConfig, BlockConfig, MlpConfig, NormConfig, TensorNames
from aioengine.families._config import DecoderFamily
from aioengine.families._rope_config import RopeConfig, read_rope


class GptNeoxFamily(DecoderFamily, frozen=True, kw_only=True):
    default_partial = 0.25
    unread = ("num_key_value_heads",)
    names = TensorNames(embedding="gpt_neox.embed_in", layers="gpt_neox.layers", norm="gpt_neox.final_layer_norm")
    prefix = "gpt_neox."
    renamed = (
        ("embed_out.", "lm_head."),
        # models without a head
        ("embed_in.", "gpt_neox.embed_in."),
        ("layers.", "gpt_neox.layers."),
        ("final_layer_norm.", "gpt_neox.final_layer_norm."),
    )
    buffers = ("rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias")
    norm = NormConfig(kind="layer", has_bias=True)
    attention = AttentionConfig(qkv=("query_key_value",), is_grouped=True, output="dense")
    mlp = MlpConfig(first=("dense_h_to_4h",), second="dense_4h_to_h", is_gated=False)
    mlp_bias = True

    hidden_act: str = "gelu"
    rms_norm_eps: float = field(default=1e-5, name="layer_norm_eps")
    rotary_pct: float | None = None
    rotary_emb_base: float | None = None
    use_parallel_residual: bool = True
    attention_bias: bool = True

    @property
    def rope(self) -> RopeConfig:
        return read_rope(
            self.rotation,
            self.default_theta if self.rotary_emb_base is None else self.rotary_emb_base,  # rope_theta is ignored
            partial=self.default_partial if self.rotary_pct is None else self.rotary_pct,
            original=self.original_max_position_embeddings,
        )

    @property
    def block(self) -> BlockConfig:
        return BlockConfig(attention="attention.", is_parallel=self.use_parallel_residual)


PLUGIN = GptNeoxFamily

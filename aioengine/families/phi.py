"""Phi."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta, field

from aioengine.families._block_config import AttentionConfig, BlockConfig, HeadNorm, MlpConfig, NormConfig, TensorNames
from aioengine.families._config import DecoderFamily
from aioengine.families._fields import not_implemented


class PhiFamily(DecoderFamily, frozen=True, kw_only=True):
    """Phi-1, Phi-1.5 and Phi-2: parallel attention and MLP, biases, partial rotary embedding."""

    default_partial = 0.5
    names = TensorNames(norm="model.final_layernorm")
    norm = NormConfig(kind="layer", has_bias=True)
    block = BlockConfig(is_parallel=True, mlp_norm="")
    attention_bias = True
    mlp = MlpConfig(first=("fc1",), second="fc2", is_gated=False)
    mlp_bias = True
    head_bias = True

    hidden_act: str = "gelu_new"
    rms_norm_eps: float = field(default=1e-5, name="layer_norm_eps")
    qk_layernorm: bool = False

    @property
    def attention(self) -> AttentionConfig:
        head_norm = HeadNorm(names=("q_layernorm", "k_layernorm"), norm=self.norm) if self.qk_layernorm else None
        return AttentionConfig(output="dense", head_norm=head_norm)


class Phi3Family(DecoderFamily, frozen=True, kw_only=True):
    """Phi-3, Phi-3.5 and Phi-4: Llama with fused projections, and LongRoPE for long contexts."""

    default_partial = 1.0
    has_one_window = True
    attention = AttentionConfig(qkv=("qkv_proj",))
    mlp = MlpConfig(first=("gate_up_proj",))

    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 4096
    original_max_position_embeddings: Annotated[int, Meta(ge=1)] = 4096
    sliding_window: int | None = None

    @property
    def rotation(self) -> Mapping[str, object]:
        """``rope_parameters`` with the current name of LongRoPE, and with the original context length."""
        parameters = super().rotation
        rope_type = parameters.get("rope_type", parameters.get("type", "default"))
        if rope_type == "default":
            return parameters
        if rope_type not in ("longrope", "su", "yarn"):
            name = "rope_scaling" if self.rope_scaling else "rope_parameters"
            not_implemented(f"{name}.rope_type", rope_type, "longrope")
        original = self.original_max_position_embeddings
        return {**parameters, "rope_type": "longrope", "original_max_position_embeddings": original}


PLUGIN = PhiFamily

"""Phi-1, Phi-1.5 and Phi-2: parallel attention and MLP, biases, partial rotary embedding."""

from __future__ import annotations

from typing import ClassVar

import msgspec
from msgspec.structs import replace

from aioengine.families._block_config import AttentionConfig, BlockConfig, HeadNorm, MlpConfig, NormConfig, TensorNames
from aioengine.families._config import DecoderConfig, DecoderFamily


class PhiFamily(DecoderFamily, frozen=True, kw_only=True):
    default_partial: ClassVar[float | None] = 0.5
    names = TensorNames(norm="model.final_layernorm")
    norm = NormConfig(kind="layer", has_bias=True)
    block = BlockConfig(is_parallel=True, mlp_norm="")
    mlp = MlpConfig(first=("fc1",), second="fc2", is_gated=False, has_bias=True)

    hidden_act: str = "gelu_new"
    rms_norm_eps: float = msgspec.field(default=1e-5, name="layer_norm_eps")
    qk_layernorm: bool = False

    def decoder(self) -> DecoderConfig:
        head_norm = HeadNorm(names=("q_layernorm", "k_layernorm"), norm=self.norm) if self.qk_layernorm else None
        attention = AttentionConfig(output="dense", qkv_bias=True, output_bias=True, head_norm=head_norm)
        return replace(super().decoder(), attention=attention, head_bias=True)


PLUGIN = PhiFamily

"""StarCoder2: LayerNorm, biases, and an ungated MLP."""

from __future__ import annotations

from typing import ClassVar

import msgspec
from msgspec.structs import replace

from aioengine.families._block_config import AttentionConfig, MlpConfig, NormConfig
from aioengine.families._config import DecoderConfig, WindowFamily


class Starcoder2Family(WindowFamily, frozen=True, kw_only=True):
    has_one_window: ClassVar[bool] = True
    norm = NormConfig(kind="layer", has_bias=True)
    mlp = MlpConfig(first=("c_fc",), second="c_proj", is_gated=False)

    num_key_value_heads: int | None = 2
    hidden_act: str = "gelu_pytorch_tanh"
    rms_norm_eps: float = msgspec.field(default=1e-5, name="norm_epsilon")
    max_position_embeddings: int = 4096
    tie_word_embeddings: bool = True
    use_bias: bool = True
    sliding_window: int | None = None

    def decoder(self) -> DecoderConfig:
        decoder, bias = super().decoder(), self.use_bias
        attention = AttentionConfig(qkv_bias=bias, output_bias=bias)
        return replace(decoder, attention=attention, mlp=replace(decoder.mlp, has_bias=bias))


PLUGIN = Starcoder2Family

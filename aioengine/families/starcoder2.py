"""StarCoder2: LayerNorm, biases, and an ungated MLP."""

from __future__ import annotations

import msgspec

from aioengine.families._block_config import MlpConfig, NormConfig
from aioengine.families._config import DecoderFamily


class Starcoder2Family(DecoderFamily, frozen=True, kw_only=True):
    has_one_window = True
    norm = NormConfig(kind="layer", has_bias=True)
    mlp = MlpConfig(first=("c_fc",), second="c_proj", is_gated=False)

    num_key_value_heads: int | None = 2
    hidden_act: str = "gelu_pytorch_tanh"
    rms_norm_eps: float = msgspec.field(default=1e-5, name="norm_epsilon")
    max_position_embeddings: int = 4096
    tie_word_embeddings: bool = True
    attention_bias: bool = msgspec.field(default=True, name="use_bias")
    sliding_window: int | None = None

    @property
    def mlp_bias(self) -> bool:
        return self.attention_bias


PLUGIN = Starcoder2Family

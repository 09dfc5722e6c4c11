"""GPT-OSS: sliding windows in every other layer, attention sinks, and experts in MXFP4 or unquantized."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec import field
from msgspec.structs import replace

from aioengine.families._block_config import AttentionConfig, NormConfig
from aioengine.families._config import DecoderConfig, DecoderFamily
from aioengine.families._experts import MXFP4_BLOCK, ExpertsConfig, RouterConfig
from aioengine.families._fields import not_implemented

_ROTATION: Final = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


class GptOssFamily(DecoderFamily, frozen=True, kw_only=True):
    default_theta = 150_000.0
    norm = NormConfig(scales_in_fp32=True)
    attention = AttentionConfig(has_sinks=True)
    sliding_window_pattern = 2
    experts = ExpertsConfig(
        router=RouterConfig(name="router", has_bias=True),
        stored="interleaved",
        names=("experts.gate_up_proj", "experts.down_proj"),
    )

    num_key_value_heads: int | None = 8
    head_dim: int | None = 64
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 131_072
    attention_bias: bool = True
    sliding_window: int | None = 128
    num_experts: int = field(default=128, name="num_local_experts")
    experts_per_token: int = field(default=4, name="num_experts_per_tok")
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.swiglu_limit <= 0:
            not_implemented("swiglu_limit", self.swiglu_limit, "more than 0")

    @classmethod
    def read(cls, config: Mapping[str, object]) -> DecoderConfig:
        """Read config.json, which may have a ``quantization_config`` for MXFP4."""
        is_quantized = _is_quantized(config)
        decoder = super().read({**config, "quantization_config": None})
        if not is_quantized:
            return decoder
        for name, size in (("hidden_size", decoder.hidden_size), ("intermediate_size", decoder.intermediate_size)):
            if size % MXFP4_BLOCK:
                not_implemented(name, size, f"a multiple of {MXFP4_BLOCK} in MXFP4")
        assert decoder.experts is not None, "this family has experts"
        return replace(decoder, experts=replace(decoder.experts, stored="mxfp4"))

    @property
    def rotation(self) -> Mapping[str, object]:
        return super().rotation or _ROTATION

    def sized_experts(self) -> ExpertsConfig:
        experts = super().sized_experts()
        assert experts is not None, "this family has experts"
        return replace(experts, limit=self.swiglu_limit, alpha=self.swiglu_alpha)


def _is_quantized(config: Mapping[str, object]) -> bool:
    """Return whether the experts are in MXFP4. Raises ValueError for other quantizations."""
    quantization = config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if quantization is not None and method != "mxfp4":
        not_implemented("quantization_config", quantization, "quant_method mxfp4 or null")
    return quantization is not None


PLUGIN = GptOssFamily

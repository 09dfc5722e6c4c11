"""GPT-OSS: sliding windows in every other layer, learned sinks of heads, and experts, in MXFP4 or not quantized."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from msgspec import field
from msgspec.structs import replace

from aioengine.families._block_config import AttentionConfig, NormConfig
from aioengine.families._config import FamilyConfig, check_experts, decode_config, not_implemented
from aioengine.families._experts import MXFP4_BLOCK, ExpertsConfig, RouterConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.families._config import DecoderConfig

MXFP4 = "mxfp4"
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


class Config(FamilyConfig, frozen=True, kw_only=True):
    default_theta: ClassVar[float] = 150_000.0

    num_key_value_heads: int | None = 8
    head_dim: int | None = 64
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 131_072
    attention_bias: bool = True
    sliding_window: int | None = 128
    num_local_experts: int = 128
    experts_per_token: int = field(default=4, name="num_experts_per_tok")
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_experts(self.num_local_experts, self.experts_per_token, name="num_local_experts")
        if self.swiglu_limit <= 0:
            not_implemented("swiglu_limit", self.swiglu_limit, "more than 0")

    @property
    def window(self) -> int | None:
        return self.sliding_window

    @property
    def windows(self) -> tuple[int | None, ...]:
        if self.window is None or self.layer_types is not None:
            return super().windows
        return tuple(None if layer % 2 else self.window for layer in range(self.num_hidden_layers))


def read(config: Mapping[str, object]) -> DecoderConfig:
    method = _method(config)
    found = decode_config({**config, "quantization_config": None}, Config)
    for name, size in (("hidden_size", found.hidden_size), ("intermediate_size", found.intermediate_size)):
        if method is not None and size % MXFP4_BLOCK:
            not_implemented(name, size, f"multiples of {MXFP4_BLOCK} in MXFP4")
    has_rope = config.get("rope_scaling") or config.get("rope_parameters")
    experts = ExpertsConfig(
        num_experts=found.num_local_experts,
        top_k=found.experts_per_token,
        inner_size=found.intermediate_size,
        router=RouterConfig(name="router", has_bias=True),
        stored="interleaved" if method is None else "mxfp4",
        names=("experts.gate_up_proj", "experts.down_proj"),
        limit=found.swiglu_limit,
        alpha=found.swiglu_alpha,
    )
    bias = found.attention_bias
    return replace(
        found.decoder(found.rope(config if has_rope else {**config, "rope_parameters": _ROPE})),
        experts=experts,
        attention=AttentionConfig(qkv_bias=bias, output_bias=bias, has_sinks=True),
        norm=NormConfig(is_wide=True),
    )


def _method(config: Mapping[str, object]) -> str | None:
    """The quantization of the experts; None: they are not quantized."""
    given = config.get("quantization_config")
    if given is None:
        return None
    method = given.get("quant_method") if isinstance(given, dict) else None
    if method != MXFP4:
        not_implemented("quantization_config", given, "quant_method mxfp4, or null")
    return MXFP4


PLUGIN = read

"""GraniteMoE: a Llama with factors of its embeddings, scores, residual stream and logits, and experts in all layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import field
from msgspec.structs import replace

from aioengine.families._block_config import AttentionConfig, BlockConfig
from aioengine.families._config import FamilyConfig, check_experts, decode_config, not_implemented
from aioengine.families._experts import ExpertsConfig, RouterConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.families._config import DecoderConfig


class Config(FamilyConfig, frozen=True, kw_only=True):
    attention_bias: bool = False
    embedding_multiplier: float = 1.0
    logits_scaling: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    num_local_experts: int = 8
    experts_per_token: int = field(default=2, name="num_experts_per_tok")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_experts(self.num_local_experts, self.experts_per_token)
        if not self.logits_scaling:
            not_implemented("logits_scaling", self.logits_scaling, "a number other than 0")
        if self.residual_multiplier <= 0:
            not_implemented("residual_multiplier", self.residual_multiplier, "more than 0")


def read(config: Mapping[str, object]) -> DecoderConfig:
    """The residual stream is divided by ``residual_multiplier``, as in ``families/granite.py``."""
    found = decode_config(config, Config)
    experts = ExpertsConfig(
        num_experts=found.num_local_experts,
        top_k=found.experts_per_token,
        inner_size=found.intermediate_size,
        router=RouterConfig(name="router.layer"),
        stored="packed",
        names=("input_linear.weight", "output_linear.weight"),
    )
    bias = found.attention_bias
    decoder = found.decoder(found.rope(config))
    return replace(
        decoder,
        epsilon=decoder.epsilon / found.residual_multiplier**2,
        experts=experts,
        attention=AttentionConfig(qkv_bias=bias, output_bias=bias, scale=found.attention_multiplier),
        block=BlockConfig(mlp="block_sparse_moe."),
        stream_scale=found.embedding_multiplier / found.residual_multiplier,
        logits_scale=1.0 / found.logits_scaling,
    )


PLUGIN = read

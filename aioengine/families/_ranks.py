"""How a model can be divided among the ranks of tensor parallelism. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from aioengine.families._config import DecoderConfig
from aioengine.families._vision import VisionConfig

if TYPE_CHECKING:
    from aioengine.families._config import TransformerConfig

MAX_RANKS: Final = 64


def why_whole(config: TransformerConfig) -> str:
    """Return why a model cannot be divided at all; "" if it can."""
    if not isinstance(config, DecoderConfig):
        return "encoders are not divided yet"
    if isinstance(config, VisionConfig):
        return "models with images are not divided yet"
    if config.task != "generate":
        return "models that return vectors or scores are not divided yet"
    if config.stateful is not None:
        return "layers with recurrent states are not divided yet"
    if config.attention.latent is not None:
        return "latent attention is not divided yet"
    if config.experts is not None:
        return "experts are not divided yet"
    return ""


def rank_counts(config: TransformerConfig) -> list[int]:
    """Return the numbers of ranks among which a model can be divided."""
    if why_whole(config):
        return [1]
    return [count for count in range(1, MAX_RANKS + 1) if _divides(config, count)]


def part_of(config: TransformerConfig, num_ranks: int) -> TransformerConfig:
    """Return a config with the sizes of the first rank, for estimates of its memory."""
    if num_ranks == 1:
        return config
    return replace(
        config,
        vocab_size=-(-config.vocab_size // num_ranks),
        num_heads=config.num_heads // num_ranks,
        num_kv_heads=max(config.num_kv_heads // num_ranks, 1),
        intermediate_size=config.intermediate_size // num_ranks,
    )


def describe_sizes(config: TransformerConfig) -> str:
    """Return the sizes that limit the number of ranks, for errors."""
    return (
        f"it has {config.num_heads} attention heads, {config.num_kv_heads} KV heads and MLPs of "
        f"{config.intermediate_size} (intermediate_size)"
    )


def _divides(config: TransformerConfig, num_ranks: int) -> bool:
    """Return whether the ranks have equal shares. Several ranks may have the same KV head."""
    num_kv_heads = config.num_kv_heads
    shares = max(num_kv_heads, num_ranks) % min(num_kv_heads, num_ranks)
    return not (config.num_heads % num_ranks or config.intermediate_size % num_ranks or shares)

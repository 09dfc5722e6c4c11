"""How a model can be divided among the ranks of tensor parallelism. Torch-free."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from aioengine.families._config import DecoderConfig, TransformerConfig
from aioengine.families._experts import MXFP4_BLOCK
from aioengine.families._vision import VisionConfig

MAX_RANKS: Final = 64


def why_whole(config: TransformerConfig) -> str:
    """Return why a model cannot be divided at all; "" if it can."""
    if not isinstance(config, DecoderConfig):
        return "encoders are not divided yet"
    if isinstance(config, VisionConfig):
        return "models with images are not divided yet"
    return ""


def rank_counts(config: TransformerConfig) -> list[int]:
    """Return the numbers of ranks among which a model can be divided."""
    if why_whole(config):
        return [1]
    return [count for count in range(1, MAX_RANKS + 1) if _divides(config, count)]


def part_of(config: TransformerConfig, num_ranks: int) -> TransformerConfig:
    """Return a config with the sizes of the first rank, for estimates of its memory.

    Latent attention and layers with states are not divided.
    """
    if num_ranks == 1 or not isinstance(config, DecoderConfig):
        return config
    experts = config.experts
    if experts is not None:
        shared = experts.shared
        if shared is not None:
            shared = replace(shared, inner_size=shared.inner_size // num_ranks)
        experts = replace(experts, inner_size=experts.inner_size // num_ranks, shared=shared)
    is_latent = config.attention.latent is not None
    return replace(
        config,
        vocab_size=-(-config.vocab_size // num_ranks),
        num_heads=config.num_heads if is_latent else config.num_heads // num_ranks,
        num_kv_heads=config.num_kv_heads if is_latent else max(config.num_kv_heads // num_ranks, 1),
        intermediate_size=config.intermediate_size // num_ranks,
        experts=experts,
    )


def describe_sizes(config: TransformerConfig) -> str:
    """Return the sizes that limit the number of ranks, for errors."""
    sizes = ", ".join(str(size) for size in _inner_sizes(config))
    return f"it has {config.num_heads} attention heads, {config.num_kv_heads} KV heads, and MLPs of size {sizes}"


def _inner_sizes(config: TransformerConfig) -> list[int]:
    """Return the inner sizes of MLPs and experts; of MXFP4 experts in blocks."""
    if not isinstance(config, DecoderConfig) or (experts := config.experts) is None:
        return [config.intermediate_size]
    has_mlp = any(config.experts_of(layer) is None for layer in range(config.num_layers))
    sizes = [config.intermediate_size] if has_mlp else []
    sizes.append(experts.inner_size // MXFP4_BLOCK if experts.stored == "mxfp4" else experts.inner_size)
    return sizes if experts.shared is None else [*sizes, experts.shared.inner_size]


def _divides(config: TransformerConfig, num_ranks: int) -> bool:
    """Return whether the ranks have equal shares. Several ranks may have the same KV head."""
    if any(size % num_ranks for size in _inner_sizes(config)):
        return False
    if isinstance(config, DecoderConfig) and config.attention.latent is not None:
        return True
    num_kv_heads = config.num_kv_heads
    return not (config.num_heads % num_ranks or max(num_kv_heads, num_ranks) % min(num_kv_heads, num_ranks))

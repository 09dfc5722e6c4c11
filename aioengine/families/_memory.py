"""What a model takes of memory, from its config alone: numbers, of whatever type they have."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from aioengine.families._block_config import MambaConfig, ShortConvConfig
from aioengine.families._config import DecoderConfig
from aioengine.families._tensors import tensor_shapes
from aioengine.page_groups import layer_groups

if TYPE_CHECKING:
    from aioengine.families._config import TransformerConfig

SNAPSHOTS_PER_ROW: Final = 16
"""Snapshots of states for each request that runs at once, at most."""

_STREAMS: Final = 3
"""Tensors of the size of the model that a block has at a time: the stream, what is added to it, and the normed."""


def num_parameters(config: TransformerConfig) -> int:
    """Of the weights that are loaded, without those of a vision tower; experts in MXFP4 as they are computed with."""
    shapes = tensor_shapes(config)
    is_packed = isinstance(config, DecoderConfig) and config.experts is not None and config.experts.stored == "mxfp4"
    if not is_packed:
        return sum(map(math.prod, shapes.values()))
    return sum(math.prod(shape) * _numbers_of_byte(name) for name, shape in shapes.items())


def active_parameters(config: TransformerConfig) -> int:
    """As ``num_parameters``, but of the experts those alone that a token goes through."""
    count = num_parameters(config)
    if not isinstance(config, DecoderConfig):
        return count
    for experts in map(config.experts_of, range(config.num_layers)):
        if experts is not None:
            count -= (experts.num_experts - experts.top_k) * 3 * experts.inner_size * config.hidden_size
    return count


def _numbers_of_byte(name: str) -> int:
    """The parameters that an entry of a tensor with experts in MXFP4 stands for: two of 4 bits, none, or one."""
    return 2 if name.endswith("_blocks") else 0 if name.endswith("_scales") else 1


def kv_numbers(config: TransformerConfig) -> int:
    """Numbers that the KV pool keeps of a token; 0 for a model that attends in both directions."""
    if not config.is_causal:
        return 0
    is_latent = isinstance(config, DecoderConfig) and config.attention.latent is not None
    sides = 1 if is_latent else 2  # keys and values, or what both are made of
    has_states = [isinstance(config, DecoderConfig) and config.keeps_state(layer) for layer in range(config.num_layers)]
    return sides * has_states.count(False) * config.num_kv_heads * config.head_size


def page_numbers(config: TransformerConfig, context_length: int) -> tuple[int, tuple[int | None, ...]]:
    """Numbers that a page of the KV pool has of a token, and the windows of the groups of layers with pages of their
    own (``PageGroups``), in rows of up to ``context_length`` tokens.
    """
    numbers = kv_numbers(config)
    reached = [None if window is None or window >= context_length else window for window in config.windows]
    groups, windows = layer_groups(reached)
    if not config.is_causal or not windows:
        return numbers, (None,)
    return numbers // len(reached) * len(groups[0]), windows


def state_bytes(config: TransformerConfig, itemsize: int) -> int:
    """Of the states that layers keep of a request; ``itemsize``: bytes of a number of the model."""
    if not isinstance(config, DecoderConfig) or (net := config.stateful) is None:
        return 0
    if isinstance(net, ShortConvConfig):
        return len(net.layers) * config.hidden_size * (net.width - 1) * itemsize
    convolution = net.num_channels * (net.width - 1) * itemsize
    num_heads = net.num_heads if isinstance(net, MambaConfig) else net.num_value_heads
    return len(net.layers) * (convolution + num_heads * net.key_size * net.value_size * 4)


def step_numbers(config: TransformerConfig) -> int:
    """Numbers that a step has at a time of each of its tokens, about; the logits are not among them."""
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_size  # of q, k, v and the output
    is_gated = not isinstance(config, DecoderConfig) or config.mlp.is_gated
    inner = (2 + is_gated) * config.intermediate_size
    if isinstance(config, DecoderConfig) and (experts := config.experts) is not None:
        inner = max(inner, experts.top_k * (3 * experts.inner_size + config.hidden_size))
    return _STREAMS * config.hidden_size + max(heads, inner)

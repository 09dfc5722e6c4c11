"""Memory needs of a model, computed from its config. Sizes are numbers of elements unless they are in bytes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from aioengine.families._block_config import MambaConfig, ShortConvConfig
from aioengine.families._config import DecoderConfig
from aioengine.families._tensors import tensor_shapes
from aioengine.settings.page_groups import layer_groups

if TYPE_CHECKING:
    from aioengine.families._config import TransformerConfig

SNAPSHOTS_PER_ROW: Final = 16
"""Maximum number of state snapshots per running request."""

_STREAMS: Final = 3
"""Tensors [T, D] that are alive at a time in a block: residual stream, its update, and the norm's output."""


def num_parameters(config: TransformerConfig) -> int:
    """Return the number of parameters without the vision tower. MXFP4 experts count as dequantized."""
    shapes = tensor_shapes(config)
    is_packed = isinstance(config, DecoderConfig) and config.experts is not None and config.experts.stored == "mxfp4"
    if not is_packed:
        return sum(map(math.prod, shapes.values()))
    return sum(math.prod(shape) * _parameters_per_element(name) for name, shape in shapes.items())


def active_parameters(config: TransformerConfig) -> int:
    """Return the number of parameters that one token uses: only ``top_k`` of the experts."""
    count = num_parameters(config)
    if not isinstance(config, DecoderConfig):
        return count
    for experts in map(config.experts_of, range(config.num_layers)):
        if experts is not None:
            count -= (experts.num_experts - experts.top_k) * 3 * experts.inner_size * config.hidden_size
    return count


def _parameters_per_element(name: str) -> int:
    """Return the parameters per element of a tensor: 2 in MXFP4 blocks, 0 in their scales, else 1."""
    return 2 if name.endswith("_blocks") else 0 if name.endswith("_scales") else 1


def kv_numbers(config: TransformerConfig) -> int:
    """Return the elements of the KV cache per token; 0 for a model that is not causal."""
    if not config.is_causal:
        return 0
    is_latent = isinstance(config, DecoderConfig) and config.attention.latent is not None
    sides = 1 if is_latent else 2  # one latent vector, or keys and values
    has_states = [isinstance(config, DecoderConfig) and config.keeps_state(layer) for layer in range(config.num_layers)]
    return sides * has_states.count(False) * config.num_kv_heads * config.head_size


def page_numbers(config: TransformerConfig, context_length: int) -> tuple[int, tuple[int | None, ...]]:
    """Return the elements per token in a page of the KV pool, and the window of each page group (``PageGroups``).

    Windows that ``context_length`` does not exceed count as none.
    """
    numbers = kv_numbers(config)
    windows_in_use = [None if window is None or window >= context_length else window for window in config.windows]
    groups, windows = layer_groups(windows_in_use)
    if not config.is_causal or not windows:
        return numbers, (None,)
    return numbers // len(windows_in_use) * len(groups[0]), windows


def state_bytes(config: TransformerConfig, itemsize: int) -> int:
    """Return the bytes of the recurrent states of one request. ``itemsize``: of the model's dtype."""
    if not isinstance(config, DecoderConfig) or (net := config.stateful) is None:
        return 0
    if isinstance(net, ShortConvConfig):
        return len(net.layers) * config.hidden_size * (net.width - 1) * itemsize
    convolution = net.num_channels * (net.width - 1) * itemsize
    num_heads = net.num_heads if isinstance(net, MambaConfig) else net.num_value_heads
    return len(net.layers) * (convolution + num_heads * net.key_size * net.value_size * 4)


def step_numbers(config: TransformerConfig) -> int:
    """Estimate the elements per token that are alive at a time in a step, without logits."""
    heads = (
        2 * config.num_heads + 2 * config.num_kv_heads
    ) * config.head_size  # queries, keys, values and the attention output
    is_gated = not isinstance(config, DecoderConfig) or config.mlp.is_gated
    inner = (2 + is_gated) * config.intermediate_size
    if isinstance(config, DecoderConfig) and (experts := config.experts) is not None:
        inner = max(inner, experts.top_k * (3 * experts.inner_size + config.hidden_size))
    return _STREAMS * config.hidden_size + max(heads, inner)

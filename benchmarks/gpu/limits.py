"""The least time that a step of a decoder can take: by what it has to read, and by what it has to compute.

Counted are the weights of the layers, once, of experts those that any token of the step goes through; keys, values and
states; the multiplications of all of these. Activations are not, nor what sampling needs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aioengine.families._tensors import checkpoint_tensors
from aioengine.settings.memory_model import kv_cache, state_bytes

if TYPE_CHECKING:
    from aioengine.families._config import DecoderConfig

ITEMSIZE = 2
PEAKS = {"H200": (4.8e12, 989e12), "H100": (3.35e12, 989e12)}
"""Bytes of memory and multiplications and additions of dense bf16 matrices a second, by a part of the device's name."""


def peaks_of(device_name: str) -> tuple[float, float]:
    """Return the peaks of a device, for an unknown device the peaks of an H200."""
    return next((peaks for name, peaks in PEAKS.items() if name in device_name), PEAKS["H200"])


@dataclass(frozen=True, slots=True)
class Step:
    """Rows of equal length.

    Attributes:
        num_new: tokens of a row that the step computes; the last one of them is sampled.
        num_before: positions of a row before these.
        num_hit: experts of a layer that any token goes through, on average.
    """

    num_rows: int
    num_new: int
    num_before: int
    num_hit: float


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds to read everything, and to compute everything."""

    reading: float
    computing: float

    @property
    def seconds(self) -> float:
        return max(self.reading, self.computing)


def limits(config: DecoderConfig, step: Step, peaks: tuple[float, float]) -> Limits:
    """Return the limits of a step of a model in bf16. ``peaks``: as ``peaks_of`` returns them."""
    num_tokens = step.num_rows * step.num_new
    head, experts, others = _weights(config)
    num_experts, top_k = (config.experts.num_experts, config.experts.top_k) if config.experts else (1, 1)
    read = head + others + experts * min(step.num_hit, num_experts) / num_experts
    num_bytes = ITEMSIZE * (read + _kv_read(config, step) + num_tokens * kv_cache(config, 1).elements_per_token)
    num_bytes += step.num_rows * state_bytes(config, ITEMSIZE) * (2 if step.num_before else 1)
    products = num_tokens * (others + experts * top_k / num_experts) + step.num_rows * head
    products += step.num_rows * _attention(config, step)
    return Limits(num_bytes / peaks[0], 2 * products / peaks[1])


def expected_hits(config: DecoderConfig, num_tokens: int) -> float:
    """Return the expected number of experts that ``num_tokens`` tokens use, each on its own and evenly; 0 for a model
    without experts.
    """
    if config.experts is None:
        return 0.0
    num_experts = config.experts.num_experts
    return num_experts * (1 - (1 - config.experts.top_k / num_experts) ** num_tokens)


def _weights(config: DecoderConfig) -> tuple[float, float, float]:
    """Return the numbers in the head, in all experts, and in the other layers."""
    shapes = {name: math.prod(spec.shape) for name, spec in checkpoint_tensors(config).items()}
    embedding = shapes.pop(f"{config.names.embedding}.weight")
    head = embedding if config.tied else shapes.pop(f"{config.names.head}.weight")
    experts = sum(count for name, count in shapes.items() if ".experts." in name)
    return head, experts, sum(shapes.values()) - experts


def _kv_read(config: DecoderConfig, step: Step) -> float:
    """Return the numbers in keys and values of earlier positions."""
    kept = [layer for layer in range(config.num_layers) if not config.keeps_state(layer)]
    seen = sum(min(step.num_before, _window(config, layer)) for layer in kept)
    return step.num_rows * seen * kv_cache(config, 1).layer_elements


def _attention(config: DecoderConfig, step: Step) -> float:
    """Return the products of scores, sums and states of a row. Latent attention has keys and values of heads."""
    latent, net = config.attention.latent, config.delta_net
    size = 2 * config.head_size
    if latent is not None:
        size = latent.plain_size + latent.rotated_size + latent.value_size
    found = 0.0
    for layer in range(config.num_layers):
        if config.keeps_state(layer):
            found += 0 if net is None else 3 * step.num_new * net.num_value_heads * net.key_size * net.value_size
        else:
            found += config.num_heads * size * _pairs(step, _window(config, layer))
    return found


def _pairs(step: Step, window: float) -> float:
    """Return the pairs of a new token and a position that it attends to."""
    first, last = step.num_before + 1, step.num_before + step.num_new
    inside = max(min(last, window) - first + 1, 0)  # of tokens that attend to all before them
    return inside * (first + min(last, window)) / 2 + (step.num_new - inside) * min(last, window)


def _window(config: DecoderConfig, layer: int) -> float:
    return (config.windows[layer] if config.windows else None) or math.inf

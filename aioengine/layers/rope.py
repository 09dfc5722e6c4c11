"""Rotary embeddings: frequencies for all scaling types, and tables of cos and sin.

Sources of the formulas: default, RoFormer; linear, position interpolation; dynamic, NTK-aware interpolation; yarn,
arXiv 2309.00071; llama3, the Llama 3.1 model card; longrope, arXiv 2402.13753.

The values match transformers, unless they depend there on the longest sequence of a call. Then the keys of a token
would depend on the chunks of the prompt.

Dynamic: the token at position p uses the base of a sequence of p + 1 tokens. This equals transformers up to
``max_position_embeddings`` tokens, and beyond it when tokens are generated one by one.

LongRoPE: all tokens of a request use the short factors if the request has up to ``original_max_position_embeddings``
tokens, else the long factors. A request that grows beyond this length is recomputed, as in transformers' Phi-3. Tables
hold the rows of short requests first, then the rows of long requests. Positions of long requests start at
``models._base.InputSpec.short_length``.

Shape letters: T tokens, E head size.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from aioengine.families._fields import not_implemented
from aioengine.families._rope_config import RopeConfig
from aioengine.kernels.heads import RotaryTables

TABLE_ROWS = 4096
"""Rows of the table that are computed at a time, to bound the temporary memory."""
MAX_TABLE = 2**18
"""Maximum number of rows of a table, which takes 128 MiB for a head size of 128."""


def _required(value: float | None) -> float:
    assert value is not None, "RopeConfig checks required parameters"
    return value


def _unscaled(base: float | Tensor, head_size: int) -> Tensor:
    """Return inverse frequencies [E / 2], or [positions, E / 2] for a base [positions, 1]."""
    device = base.device if isinstance(base, torch.Tensor) else None
    return 1.0 / (base ** (torch.arange(0, head_size, 2, dtype=torch.int64, device=device).float() / head_size))


def _llama3(config: RopeConfig, head_size: int, original: int) -> Tensor:
    """Return inverse frequencies [E / 2], scaled by wavelength."""
    factor = _required(config.factor)
    low = _required(config.low_freq_factor)
    high = _required(config.high_freq_factor)
    unscaled = _unscaled(config.rope_theta, head_size)
    wavelengths = 2 * math.pi / unscaled
    smooth = ((original / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - smooth) * unscaled / factor + smooth * unscaled


def _yarn(config: RopeConfig, head_size: int, original: int, max_positions: int) -> tuple[Tensor, float]:
    """Return inverse frequencies [E / 2], and the factor of cos and sin."""
    factor = config.factor if config.factor is not None else max_positions / original

    def magnitude(scale: float | None) -> float:
        return 1.0 if factor <= 1 else 0.1 * (1.0 if scale is None else scale) * math.log(factor) + 1.0

    attention_factor = config.attention_factor
    if attention_factor is None:
        both = bool(config.mscale and config.mscale_all_dim)
        attention_factor = magnitude(config.mscale) / magnitude(config.mscale_all_dim) if both else magnitude(None)

    def dimension(rotations: float) -> float:
        return head_size * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low, high = dimension(config.beta_fast or 32.0), dimension(config.beta_slow or 1.0)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    ramp = (torch.arange(head_size // 2, dtype=torch.float32) - low) / (high - low if high != low else 0.001)
    keep = 1 - ramp.clamp(0.0, 1.0)
    unscaled = _unscaled(config.rope_theta, head_size)
    return unscaled / factor * (1 - keep) + unscaled * keep, attention_factor


def _longrope(
    config: RopeConfig, head_size: int, original: int, *, max_positions: int, num_positions: int
) -> tuple[Tensor, float]:
    """Return inverse frequencies [E / 2], and the factor of cos and sin."""
    factors = config.long_factor if num_positions > original else config.short_factor
    assert factors is not None, "RopeConfig checks required parameters"
    scaled = 1.0 / (torch.tensor(factors, dtype=torch.float32) * (1.0 / _unscaled(config.rope_theta, head_size)))
    factor = max_positions / original if config.factor is None else config.factor
    attention_factor = config.attention_factor
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return scaled, attention_factor


def frequencies(
    config: RopeConfig, head_size: int, max_position_embeddings: int, num_positions: int
) -> tuple[Tensor, float]:
    """Return inverse frequencies [E / 2], unscaled for "dynamic", and the factor of cos and sin.

    Args:
        num_positions: of the longest sequence.
    """
    original = config.original_max_position_embeddings or max_position_embeddings
    if original < 2 and config.rope_type in {"longrope", "yarn"}:
        not_implemented("original_max_position_embeddings", original, f"at least 2 with rope_type {config.rope_type!r}")
    match config.rope_type:
        case "llama3":
            return _llama3(config, head_size, original), 1.0
        case "yarn":
            return _yarn(config, head_size, original, max_position_embeddings)
        case "longrope":
            return _longrope(
                config, head_size, original, max_positions=max_position_embeddings, num_positions=num_positions
            )
        case "linear":
            return _unscaled(config.rope_theta, head_size) / _required(config.factor), 1.0
        case _:
            return _unscaled(config.rope_theta, head_size), 1.0


def _dynamic(config: RopeConfig, head_size: int, positions: Tensor, max_position_embeddings: int) -> Tensor:
    """positions [T, 1] -> inverse frequencies [T, E / 2], with the base of the sequence that ends at the position."""
    factor = _required(config.factor)
    lengths = (positions + 1).clamp(min=max_position_embeddings).double()
    growth = factor * lengths / max_position_embeddings - (factor - 1)
    base = config.rope_theta * growth ** (head_size / (head_size - 2))
    return _unscaled(base, head_size).float()


def _axes(config: RopeConfig, num_pairs: int) -> Tensor:
    """Return the position axis (0 time, 1 height, 2 width) of each rotated pair: [E / 2]."""
    if not config.mrope_interleaved:
        return torch.arange(3).repeat_interleave(torch.tensor(config.mrope_section))
    axes = torch.zeros(num_pairs, dtype=torch.int64)
    for axis in (1, 2):
        axes[axis : 3 * config.mrope_section[axis] : 3] = axis
    return axes


class RotaryEmbedding:
    """cos and sin of positions, with the same bits for a position in every step.

    Reads them from a table of up to ``MAX_TABLE`` rows. For longer contexts, computes them in each step.

    Args:
        config: None if heads are not rotated. If a part of a head is rotated, entries are in the order of
            ``layers.heads.pair_order``.
        num_positions: of the longest request.
        short_length: with LongRoPE, positions of long requests start at this number; else 0.
    """

    def __init__(
        self,
        config: RopeConfig | None,
        head_size: int,
        *,
        max_position_embeddings: int,
        num_positions: int,
        device: torch.device,
        short_length: int = 0,
    ) -> None:
        rotary_size = 0 if config is None else config.rotary_size(head_size)
        self._num_unrotated = (head_size - rotary_size) // 2
        config = config or RopeConfig()
        num_rows, self._short_length = num_positions + short_length, short_length
        fixed, self._factor = frequencies(config, rotary_size, max_position_embeddings, num_positions)
        short, _ = frequencies(config, rotary_size, max_position_embeddings, short_length or num_positions)
        on_device = None if num_rows <= MAX_TABLE else device
        self._frequencies, self._short = fixed.to(on_device), short.to(on_device)
        self._dynamic = partial(_dynamic, config, rotary_size, max_position_embeddings=max_position_embeddings)
        self._is_dynamic = config.rope_type == "dynamic"
        self._axes = _axes(config, head_size // 2).to(device) if config.mrope_section else None
        self._table: Tensor | None = None
        if num_rows <= MAX_TABLE:
            table = torch.empty(num_rows, 2, head_size // 2)
            for part in table.split(TABLE_ROWS):
                start = int(part.storage_offset()) // head_size
                part.copy_(self._rows(torch.arange(start, start + part.shape[0]).unsqueeze(1)))
            self._table = table.to(device)

    def tables(self, positions: Tensor) -> RotaryTables:
        """Return cos and sin of positions [T], or [3, T] if the config has an ``mrope_section``."""
        if positions.dim() == 2:
            assert self._axes is not None, "the model has positions of one axis"
            by_pair = positions.index_select(0, self._axes).t()
            if self._table is None:
                return RotaryTables(self._rows(by_pair))
            return RotaryTables(self._table.gather(0, by_pair.unsqueeze(1).expand(-1, 2, -1)))
        if self._table is None:
            return RotaryTables(self._rows(positions.unsqueeze(1)))
        return RotaryTables(self._table.index_select(0, positions))

    def _rows(self, positions: Tensor) -> Tensor:
        """positions [T, 1], or one for each rotated pair [T, E / 2] -> cos and sin [T, 2, E / 2]."""
        frequencies = self._frequencies
        if self._short_length:
            is_long = positions >= self._short_length
            positions = positions - is_long * self._short_length
            frequencies = torch.where(is_long, frequencies, self._short)
        if self._is_dynamic:
            frequencies = self._dynamic(positions)
        angles = positions.float() * frequencies
        cos, sin = angles.cos() * self._factor, angles.sin() * self._factor
        if self._num_unrotated:
            cos = functional.pad(cos, (0, self._num_unrotated), value=1.0)
            sin = functional.pad(sin, (0, self._num_unrotated))
        return torch.stack((cos, sin), 1)

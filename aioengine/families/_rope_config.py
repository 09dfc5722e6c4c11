"""Rotary embeddings as described in config.json. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

import msgspec

from aioengine.families._fields import decode, not_implemented

_POSITIVE: Final = (
    "rope_theta", "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow",
    "low_freq_factor", "high_freq_factor", "short_factor", "long_factor",
)  # fmt: skip
_MIN_POSITIVE, _MAX_POSITIVE = 1e-9, 1e12
"""Range of the ``_POSITIVE`` fields. All angles are finite within it."""

_READ_ORIGINAL: Final = ("llama3", "yarn", "longrope")
_REQUIRED: Final = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """``rope_parameters`` of config.json; older files have ``rope_theta`` and ``rope_scaling``.

    Attributes:
        short_factor, long_factor: with "longrope", the divisors of the frequencies for contexts of up to
            ``original_max_position_embeddings`` tokens, and for longer ones.
        mrope_section: with three-axis positions (time, height, width), the number of rotated pairs per axis.
        mrope_interleaved: pairs cycle through the axes. Otherwise the pairs of an axis are contiguous.
    """

    rope_type: Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope"] = "default"
    rope_theta: float = 10_000.0
    partial_rotary_factor: float = 1.0
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None
    mrope_section: tuple[int, ...] = ()
    mrope_interleaved: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.partial_rotary_factor <= 1:
            not_implemented("partial_rotary_factor", self.partial_rotary_factor, "more than 0, at most 1")
        values = msgspec.structs.asdict(self)
        for field in _REQUIRED.get(self.rope_type, ()):
            if values[field] is None:
                raise ValueError(f"rope_parameters.{field} is missing; rope_type {self.rope_type!r} needs it")
        for field in _POSITIVE:
            numbers = values[field] if isinstance(values[field], tuple) else (values[field],)
            if any(number is not None and not _MIN_POSITIVE <= number <= _MAX_POSITIVE for number in numbers):
                not_implemented(f"rope_parameters.{field}", values[field], f"{_MIN_POSITIVE:g} to {_MAX_POSITIVE:g}")
        if self.rope_type == "yarn":
            self._check_yarn()
        low, high = self.low_freq_factor, self.high_freq_factor
        if self.rope_type == "llama3" and low is not None and high is not None and high <= low:
            not_implemented("rope_parameters.high_freq_factor", high, f"more than low_freq_factor, which is {low}")

    def rotary_size(self, head_size: int) -> int:
        """Return the number of leading entries of a head that are rotated."""
        return int(head_size * self.partial_rotary_factor)

    def check_head(self, head_size: int) -> None:
        """Raise ValueError if heads of this size cannot be rotated."""
        size = self.rotary_size(head_size)
        if self.rope_type == "dynamic" and size < 4:
            not_implemented("head_dim", head_size, "at least 4 rotated entries with rope_type 'dynamic'")
        if size % 2 or not size:
            even = f"an even number of entries of heads of {head_size}"
            not_implemented("partial_rotary_factor", self.partial_rotary_factor, even)
        for field, factors in (("short_factor", self.short_factor), ("long_factor", self.long_factor)):
            if self.rope_type == "longrope" and len(factors or ()) != size // 2:
                not_implemented(f"rope_parameters.{field}", f"of {len(factors or ())} numbers", f"{size // 2} numbers")

    def _check_yarn(self) -> None:
        if self.factor is not None and self.factor < 1:
            not_implemented("rope_parameters.factor", self.factor, "at least 1 with rope_type 'yarn'")
        if self.rope_theta <= 1:
            not_implemented("rope_parameters.rope_theta", self.rope_theta, "more than 1 with rope_type 'yarn'")
        for field, value in (("mscale", self.mscale), ("mscale_all_dim", self.mscale_all_dim)):
            if value is not None and not 0 <= value <= _MAX_POSITIVE:
                not_implemented(f"rope_parameters.{field}", value, f"0 to {_MAX_POSITIVE:g}")


def read_rope(
    parameters: Mapping[str, object], theta: float, *, partial: float | None = None, original: int | None = None
) -> RopeConfig:
    """Read ``rope_parameters``, which older files name ``rope_scaling``.

    Args:
        theta: default of ``rope_theta``.
        partial: default of ``partial_rotary_factor``; None if the family always rotates whole heads.
        original: ``original_max_position_embeddings`` of config.json itself, which overrides the one in ``parameters``.

    Raises ValueError if the scaling is not implemented.
    """
    fields: dict[str, object] = {"rope_theta": theta}
    if partial is not None:
        fields["partial_rotary_factor"] = partial
    fields |= {"rope_type": parameters.get("type", "default"), **parameters}
    if original is not None and fields["rope_type"] in _READ_ORIGINAL:
        fields["original_max_position_embeddings"] = original
    rope = decode(fields, RopeConfig, "config.json", path="$.rope_parameters")
    if partial is None and rope.partial_rotary_factor != 1.0:
        not_implemented("partial_rotary_factor", rope.partial_rotary_factor, "1.0")
    return rope


def read_layer_rope(
    layer_parameters: Mapping[str, object] | None, scaling: Mapping[str, object] | None, theta: float
) -> RopeConfig:
    """Read the rotary embedding of one layer type.

    Args:
        layer_parameters: the entry of the layer type in ``rope_parameters``.
        scaling: ``rope_scaling`` of older files, if it applies to this layer type.
        theta: default of ``rope_theta``.

    Raises ValueError if the scaling is not implemented, or transformers would ignore a part of it.
    """
    scaling = scaling or {}
    if "type" in scaling and "rope_type" not in scaling:
        not_implemented("rope_scaling.type", scaling["type"], "rope_type, in a model with several rotary embeddings")
    parameters = {**(layer_parameters or {}), **scaling}
    if parameters.get("truncate") is False:
        not_implemented("rope_parameters.truncate", False, "true, in a model with several rotary embeddings")
    return read_rope(parameters, theta)

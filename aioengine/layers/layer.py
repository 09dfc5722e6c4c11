"""The base class of the parts of a model: loads their weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aioengine.layers.placement import Target


class Layer:
    """A part of a model, which may consist of other layers.

    Attributes:
        is_adaptable: whether adapters may change the linear layers in it.
        parts: the layers of this layer, each with the prefix of its tensor names; entries with None are skipped.
    """

    is_adaptable: bool = True
    parts: Sequence[tuple[str, Layer | None]] = ()

    def own_weights(self) -> dict[str, Target]:
        """Map tensor names to targets, without the tensors of ``parts``."""
        return {}

    def weights(self, prefix: str = "") -> dict[str, Target]:
        """Map tensor names in the checkpoint to targets, for this layer and its parts.

        Valid until ``finish_loading``, and again after ``open_for_loading``.
        """
        targets = {f"{prefix}{name}": target for name, target in self.own_weights().items()}
        for part_prefix, part in self.parts:
            if part is not None:
                targets |= part.weights(f"{prefix}{part_prefix}")
        return targets

    def finish_loading(self) -> None:
        """Convert the loaded weights to the form that the kernels read."""
        for _, part in self.parts:
            if part is not None:
                part.finish_loading()

    def open_for_loading(self) -> None:
        """Make ``weights`` valid again. The tensors have the current values."""
        for _, part in self.parts:
            if part is not None:
                part.open_for_loading()

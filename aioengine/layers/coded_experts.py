"""Loads a quantized matrix of all experts, from one tensor for all experts or separate tensors for each.

Shape letters: E experts, O outputs of an expert, D inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from aioengine.layers.linear import unplaced_targets
from aioengine.layers.placement import Target
from aioengine.quantization._base import LinearSpec

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.kernels.codes import Codes
    from aioengine.layers.placement import Placement
    from aioengine.quantization._base import CodesFormat, Tensors


class CodedExperts:
    """The codes [E * O, D] of a matrix, while they are loaded.

    Args:
        names: of the fused parts of an expert, such as gate and up.
        inner_size: the outputs of a part.
    """

    def __init__(
        self,
        linear_format: CodesFormat,
        names: tuple[str, ...],
        in_features: int,
        inner_size: int,
        num_experts: int,
        placement: Placement,
    ) -> None:
        self._format = linear_format
        self._names = names
        self._layer = LinearSpec(
            in_features, (inner_size,) * len(names), False, placement.dtype, placement.device
        )  # of one expert
        self._kept: list[Tensors] = [{} for _ in range(num_experts)]
        self._loaded = [linear_format.empty(self._layer) for _ in range(num_experts)]

    def targets(self) -> dict[str, Target]:
        """Map tensor names within the MLP to targets."""
        return {
            f"experts.{expert}.{part}.{name}": target
            for expert, tensors in enumerate(self._loaded)
            for name, targets in unplaced_targets(self._format, self._layer, tensors)
            for part, target in zip(self._names, targets, strict=True)
        }

    def assemble(self) -> Codes:
        """Return the codes. Converts expert by expert, and frees the loaded tensors, to bound the memory."""
        joined: Codes | None = None
        for expert in range(len(self._kept)):
            tensors = self._loaded.pop(0)
            codes = self._format.codes(self._layer, tensors)
            if codes.offsets is None:  # depends on the zero points of the expert
                codes = codes._replace(offsets=torch.zeros_like(codes.scales))
            self._kept[expert] = self._format.kept(tensors)
            joined = codes._replace(**self._empty(codes)) if joined is None else joined
            for own, new in zip(_tensors(joined), _tensors(codes), strict=True):
                own[expert * len(new) : (expert + 1) * len(new)] = new
        assert joined is not None
        assert joined.offsets is not None
        return joined if joined.offsets.any() else joined._replace(offsets=None)

    def _empty(self, codes: Codes) -> dict[str, Tensor]:
        """Return uninitialized tensors [E * O, ...] for codes [O, D] of one expert."""
        tensors = {"packed": codes.packed, "scales": codes.scales, "offsets": codes.offsets}
        return {
            name: own.new_empty(len(self._kept) * len(own), *own.shape[1:])
            for name, own in tensors.items()
            if own is not None
        }

    def open_for_loading(self, codes: Codes) -> None:
        """Restore the loaded tensors from codes [E * O, D]."""
        parts = codes.split([sum(self._layer.sizes)] * len(self._kept))
        self._loaded = [
            kept | self._format.tensors(self._layer, part) for kept, part in zip(self._kept, parts, strict=True)
        ]


class JoinedExperts:
    """The codes [E * O, D] of a matrix whose tensor [E, O, D] is quantized while it is loaded."""

    def __init__(
        self,
        linear_format: CodesFormat,
        name: str,
        in_features: int,
        out_features: int,
        num_experts: int,
        placement: Placement,
    ) -> None:
        self._format, self._name = linear_format, name
        self._shape = num_experts, out_features, in_features
        sizes = (num_experts * out_features,)
        self._layer = LinearSpec(in_features, sizes, False, placement.dtype, placement.device)
        self._loaded = linear_format.empty(self._layer)

    def targets(self) -> dict[str, Target]:
        """Map the name of the tensor within the MLP to its target."""
        [writer] = self._format.writers(self._layer, self._loaded)["weight"]
        return {self._name: Target(writer.placeholder.view(self._shape), writer=writer)}

    def assemble(self) -> Codes:
        """Return the codes."""
        codes, self._loaded = self._format.codes(self._layer, self._loaded), {}
        return codes

    def open_for_loading(self, codes: Codes) -> None:
        """Restore the loaded tensors from codes [E * O, D]."""
        self._loaded = self._format.tensors(self._layer, codes)


def _tensors(codes: Codes) -> list[Tensor]:
    """Return the tensors [O, ...] of codes [O, D]."""
    return [own for own in codes[:3] if isinstance(own, torch.Tensor)]

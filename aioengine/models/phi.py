"""Phi-1, Phi-1.5 and Phi-2."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.families import phi
from aioengine.models._decoder import Decoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.models._base import ModelOptions


class Phi(Decoder):
    """Attention and MLP read the same norm of the stream."""

    def __init__(self, config: Mapping[str, object], options: ModelOptions) -> None:
        super().__init__(phi.read(config), options)


PLUGIN = Phi

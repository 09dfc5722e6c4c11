"""OPT."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.families import opt
from aioengine.models._decoder import Decoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.models._base import ModelOptions


class OPT(Decoder):
    """Learned positions, and ReLU."""

    def __init__(self, config: Mapping[str, object], options: ModelOptions) -> None:
        super().__init__(opt.read(config), options)


PLUGIN = OPT

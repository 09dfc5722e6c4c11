"""ERNIE 4.5, dense."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.families import ernie4_5
from aioengine.models._decoder import Decoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.models._base import ModelOptions


class Ernie45(Decoder):
    """The rotation pairs neighbours."""

    def __init__(self, config: Mapping[str, object], options: ModelOptions) -> None:
        super().__init__(ernie4_5.read(config), options)


PLUGIN = Ernie45

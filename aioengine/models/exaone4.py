"""EXAONE 4."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.families import exaone4
from aioengine.models._decoder import Decoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.models._base import ModelOptions


class Exaone4(Decoder):
    """Norms behind attention and MLP."""

    def __init__(self, config: Mapping[str, object], options: ModelOptions) -> None:
        super().__init__(exaone4.read(config), options)


PLUGIN = Exaone4

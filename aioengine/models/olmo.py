"""OLMo, the first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.families import olmo
from aioengine.models._decoder import Decoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.models._base import ModelOptions


class Olmo(Decoder):
    """Norms without weights."""

    def __init__(self, config: Mapping[str, object], options: ModelOptions) -> None:
        super().__init__(olmo.read(config), options)


PLUGIN = Olmo

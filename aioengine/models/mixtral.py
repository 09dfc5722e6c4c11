"""Mixtral."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.families import mixtral
from aioengine.models._decoder import Decoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.models._base import ModelOptions


class Mixtral(Decoder):
    """Experts in all layers."""

    def __init__(self, config: Mapping[str, object], options: ModelOptions) -> None:
        super().__init__(mixtral.read(config), options)


PLUGIN = Mixtral

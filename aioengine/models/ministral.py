"""Ministral of 2024."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.families import ministral
from aioengine.models._decoder import Decoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.models._base import ModelOptions


class Ministral(Decoder):
    """Windows in some layers."""

    def __init__(self, config: Mapping[str, object], options: ModelOptions) -> None:
        super().__init__(ministral.read(config), options)


PLUGIN = Ministral

"""Falcon 7B, 40B, 180B and Falcon 2."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.families import falcon
from aioengine.models._decoder import Decoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.models._base import ModelOptions


class Falcon(Decoder):
    """Attention and MLP side by side."""

    def __init__(self, config: Mapping[str, object], options: ModelOptions) -> None:
        super().__init__(falcon.read(config), options)


PLUGIN = Falcon

"""BERT."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.families import bert
from aioengine.models._encoder import Encoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.models._base import ModelOptions


class Bert(Encoder):
    def __init__(self, config: Mapping[str, object], options: ModelOptions) -> None:
        super().__init__(bert.PLUGIN(config), options)


PLUGIN = Bert

"""StarCoder2."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.families import starcoder2
from aioengine.models._decoder import Decoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.models._base import ModelOptions


class Starcoder2(Decoder):
    """Norms with means, biases, and an MLP without gates."""

    def __init__(self, config: Mapping[str, object], options: ModelOptions) -> None:
        super().__init__(starcoder2.read(config), options)


PLUGIN = Starcoder2

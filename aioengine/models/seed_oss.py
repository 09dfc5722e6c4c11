"""Seed-OSS."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.families import seed_oss
from aioengine.models._decoder import Decoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.models._base import ModelOptions


class SeedOss(Decoder):
    """Biases on queries, keys and values."""

    def __init__(self, config: Mapping[str, object], options: ModelOptions) -> None:
        super().__init__(seed_oss.read(config), options)


PLUGIN = SeedOss

"""Qwen3, dense."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.families import qwen3
from aioengine.models._decoder import Decoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.models._base import ModelOptions


class Qwen3(Decoder):
    """A norm over each head of queries and keys."""

    def __init__(self, config: Mapping[str, object], options: ModelOptions) -> None:
        super().__init__(qwen3.read(config), options)


PLUGIN = Qwen3

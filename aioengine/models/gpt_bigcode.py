"""GPT-BigCode: StarCoder and SantaCoder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.families import gpt_bigcode
from aioengine.models._decoder import Decoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.models._base import ModelOptions


class GPTBigCode(Decoder):
    """A GPT-2 with one head of keys and values."""

    def __init__(self, config: Mapping[str, object], options: ModelOptions) -> None:
        super().__init__(gpt_bigcode.read(config), options)


PLUGIN = GPTBigCode

"""GPT-2."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.families import gpt2
from aioengine.models._decoder import Decoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.models._base import ModelOptions


class GPT2(Decoder):
    """Learned positions."""

    def __init__(self, config: Mapping[str, object], options: ModelOptions) -> None:
        super().__init__(gpt2.read(config), options)


PLUGIN = GPT2

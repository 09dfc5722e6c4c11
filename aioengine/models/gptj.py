"""GPT-J."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.families import gptj
from aioengine.models._decoder import Decoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.models._base import ModelOptions


class GPTJ(Decoder):
    """Attention and MLP read the same norm of the stream."""

    def __init__(self, config: Mapping[str, object], options: ModelOptions) -> None:
        super().__init__(gptj.read(config), options)


PLUGIN = GPTJ

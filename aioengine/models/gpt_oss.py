"""GPT-OSS."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.families import gpt_oss
from aioengine.models._decoder import Decoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.models._base import ModelOptions


class GptOss(Decoder):
    """Learned sinks, windows in every other layer, and experts."""

    def __init__(self, config: Mapping[str, object], options: ModelOptions) -> None:
        super().__init__(gpt_oss.read(config), options)


PLUGIN = GptOss

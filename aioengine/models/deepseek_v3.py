"""DeepSeek-V3."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.families import deepseek_v3
from aioengine.models._decoder import Decoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.models._base import ModelOptions


class DeepseekV3(Decoder):
    """Latent attention and experts."""

    def __init__(self, config: Mapping[str, object], options: ModelOptions) -> None:
        super().__init__(deepseek_v3.read(config), options)


PLUGIN = DeepseekV3

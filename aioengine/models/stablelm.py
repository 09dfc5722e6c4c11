"""StableLM 2, and Zephyr 3B."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.families import stablelm
from aioengine.models._decoder import Decoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.models._base import ModelOptions


class StableLM(Decoder):
    """Norms with means; a part of each head is rotated."""

    def __init__(self, config: Mapping[str, object], options: ModelOptions) -> None:
        super().__init__(stablelm.read(config), options)


PLUGIN = StableLM

"""GPT-NeoX and Pythia."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.families import gpt_neox
from aioengine.models._decoder import Decoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.models._base import ModelOptions


class GPTNeoX(Decoder):
    """Attention and MLP side by side, with a norm each."""

    def __init__(self, config: Mapping[str, object], options: ModelOptions) -> None:
        super().__init__(gpt_neox.read(config), options)


PLUGIN = GPTNeoX

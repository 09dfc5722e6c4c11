"""A Llama without a head, with bidirectional attention, like embedding models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from aioengine.families._config import Task
from aioengine.families.llama import LlamaFamily
from aioengine.models._decoder import DecoderModel

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.layers.layer import Target
    from aioengine.models._base import ModelOptions


class BidirectionalLlama(DecoderModel):
    def __init__(self, config: Mapping[str, object], options: ModelOptions) -> None:
        read = LlamaFamily.read({**config, "architectures": None})
        super().__init__(replace(read, task=Task.EMBED, is_causal=False, tied=True), options)

    def weights(self) -> dict[str, Target]:
        return {name.removeprefix("model."): target for name, target in super().weights().items()}


PLUGIN = BidirectionalLlama

"""XLM-RoBERTa."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.families import xlm_roberta
from aioengine.models._encoder import Encoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.models._base import ModelOptions


class XlmRoberta(Encoder):
    def __init__(self, config: Mapping[str, object], options: ModelOptions) -> None:
        super().__init__(xlm_roberta.PLUGIN(config), options)


PLUGIN = XlmRoberta

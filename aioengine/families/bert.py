"""BERT: learned positions, token types, norms behind attention and MLP."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.families._config import decode_config
from aioengine.families._encoders import BertFamily, HeadConfig, bert_config

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.families._encoders import EncoderConfig


def read(config: Mapping[str, object]) -> EncoderConfig:
    head = HeadConfig(dense="bert.pooler.dense", scores="classifier")
    return bert_config(decode_config(config, BertFamily), name="bert", position_offset=0, head=head)


PLUGIN = read

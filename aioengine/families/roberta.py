"""RoBERTa: as BERT, with positions that begin behind the padding's, and another head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.families._config import decode_config
from aioengine.families._encoders import BertFamily, HeadConfig, bert_config

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.families._encoders import EncoderConfig


class Config(BertFamily, frozen=True, kw_only=True):
    pad_token_id: int = 1


def read(config: Mapping[str, object]) -> EncoderConfig:
    found = decode_config(config, Config)
    head = HeadConfig(dense="classifier.dense", scores="classifier.out_proj")
    return bert_config(found, name="roberta", position_offset=found.pad_token_id + 1, head=head)


PLUGIN = read

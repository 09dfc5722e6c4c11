"""GPT-BigCode (StarCoder, SantaCoder): a GPT-2 with one head of keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from aioengine.families import gpt2
from aioengine.families._config import FamilyConfig, decode_config

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.families._config import DecoderConfig


class Config(gpt2.Config, frozen=True, kw_only=True):
    tasks = FamilyConfig.tasks

    hidden_act: str = msgspec.field(default="gelu_pytorch_tanh", name="activation_function")
    multi_query: bool = True

    @property
    def num_kv_heads(self) -> int:
        return 1 if self.multi_query else self.num_attention_heads


def read(config: Mapping[str, object]) -> DecoderConfig:
    decoder = gpt2.gpt2_decoder(decode_config(gpt2.own_names(config, Config), Config))
    attention = replace(decoder.attention, is_grouped=decoder.num_kv_heads > 1)
    return replace(decoder, attention=attention, is_transposed=False)


PLUGIN = read

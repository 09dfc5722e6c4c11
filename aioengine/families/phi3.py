"""Phi-3, Phi-3.5 and Phi-4: a Llama whose checkpoint has fused layers; long contexts by longrope."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from msgspec import Meta
from msgspec.structs import replace

from aioengine.families._block_config import AttentionConfig
from aioengine.families._config import FamilyConfig, decode_config, not_implemented

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.families._config import DecoderConfig


class Config(FamilyConfig, frozen=True, kw_only=True):
    default_partial: ClassVar[float | None] = 1.0
    has_one_window: ClassVar[bool] = True

    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 4096
    original_max_position_embeddings: Annotated[int, Meta(ge=1)] = 4096
    sliding_window: int | None = None

    @property
    def window(self) -> int | None:
        return self.sliding_window


def read(config: Mapping[str, object]) -> DecoderConfig:
    found = decode_config(config, Config)
    decoder = found.decoder(found.rope(_with_longrope(config, found.original_max_position_embeddings)))
    return replace(
        decoder,
        attention=AttentionConfig(qkv=("qkv_proj",)),
        mlp=replace(decoder.mlp, first=("gate_up_proj",)),
    )


def _with_longrope(raw: Mapping[str, object], original: int) -> dict[str, object]:
    """config.json with the scaling under its name of today, and with the length that it is made for.

    The length is that beside the scaling where there are both.
    """
    name = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    given = raw.get(name)
    if not isinstance(given, dict) or given.get("rope_type", given.get("type", "default")) == "default":
        return {**raw}
    rope_type = given.get("rope_type", given.get("type"))
    if rope_type in ("su", "yarn"):
        rope_type = "longrope"
    if rope_type != "longrope":
        not_implemented(f"{name}.rope_type", rope_type, "longrope")
    return {**raw, name: {**given, "rope_type": rope_type, "original_max_position_embeddings": original}}


PLUGIN = read

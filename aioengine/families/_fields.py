"""Reads and checks fields of config.json. Torch-free."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Mapping
from typing import Final, Literal, NoReturn, TypeVar

import msgspec

from aioengine.api.checks import cut, shown

ConfigType = TypeVar("ConfigType", bound=msgspec.Struct)

_COUNTS: Final = (
    "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "num_experts", "num_local_experts",
    "num_nextn_predict_layers", "num_mtp_layers", "num_shared_experts", "experts_per_token", "head_dim",
    "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
)  # fmt: skip
MAX_SIZES: Final[dict[str, int]] = {
    "max_position_embeddings": 2**31 - 1,
    "vocab_size": 2**27,
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"), 2**24),
    **dict.fromkeys(("hidden_size", "q_lora_rank"), 2**20),
    **dict.fromkeys(_COUNTS, 2**14),
}
"""Upper limits of sizes, far beyond all models. A larger value is a mistake that would exhaust time or memory."""

_MIN_FACTOR, _MAX_FACTOR = 1e-6, 1e6


def not_implemented(field: str, value: object, implemented: str) -> NoReturn:
    """Raise ValueError for the value of a field. ``implemented``: the values that work."""
    raise ValueError(f"{field} {shown(value)} is not implemented; allowed: {implemented}")


def decode_config(raw: Mapping[str, object], config_type: type[ConfigType]) -> ConfigType:
    """Read config.json into a Struct.

    Raises ValueError, which names the field, if a field is missing, has a wrong type, or is not implemented.
    """
    if raw.get("per_layer_config"):
        not_implemented("per_layer_config", raw["per_layer_config"], "layers of the same config")
    if raw.get("quantization_config") is not None:
        not_implemented("quantization_config", raw["quantization_config"], "checkpoints that are not quantized")
    return decode(raw, config_type, f"config.json of model_type {shown(raw.get('model_type'))}")


def decode(fields: Mapping[str, object], config_type: type[ConfigType], where: str, *, path: str = "$") -> ConfigType:
    """Read an object of a JSON file into a Struct.

    Args:
        where: the file, for error messages.
        path: the path of the object in the file, for error messages.
    """
    try:
        return msgspec.convert(fields, config_type)
    except msgspec.ValidationError as error:
        wrong = cut(str(error)).replace("at `$", f"at `{path}") + _what_works(error, config_type)
        raise ValueError(f"{where}: {wrong}") from error


def _what_works(error: msgspec.ValidationError, config_type: type[msgspec.Struct]) -> str:
    """Return "; allowed: ..." if the field in the error accepts only a few values, else ""."""
    match = re.search(r"at `\$\.(\w+)", str(error))
    names = {field.encode_name: field.name for field in msgspec.structs.fields(config_type)}
    name = names.get(match[1]) if match else None
    kinds = [typing.get_type_hints(config_type)[name]] if name else []
    values: list[object] = []
    while kinds:
        kind = kinds.pop(0)
        if kind is types.NoneType:
            values.append(None)
        elif typing.get_origin(kind) is Literal:
            values += typing.get_args(kind)
        elif typing.get_origin(kind) in (list, typing.Union, types.UnionType):
            kinds += typing.get_args(kind)
        else:
            return ""
    return "; allowed: " + ", ".join(msgspec.json.encode(value).decode() for value in values) if values else ""


def check_sizes(config: msgspec.Struct, limits: Mapping[str, tuple[int, int]] | None = None) -> None:
    """Raise ValueError if a size is out of range. The default range is from 1 to ``MAX_SIZES``.

    ``limits``: field -> smallest and largest value.
    """
    values, names = msgspec.structs.asdict(config), file_names(config)
    defaults = {name: (1, maximum) for name, maximum in MAX_SIZES.items()}
    for name, (minimum, maximum) in {**defaults, **(limits or {})}.items():
        if values.get(name) is not None and not minimum <= values[name] <= maximum:
            not_implemented(names[name], values[name], f"{minimum} to {maximum}")


def check_factor(field: str, factor: float) -> None:
    """Raise ValueError if the square or the inverse of ``factor`` may overflow."""
    if not _MIN_FACTOR <= factor <= _MAX_FACTOR:
        not_implemented(field, factor, f"{_MIN_FACTOR:g} to {_MAX_FACTOR:g}")


def file_names(config: msgspec.Struct) -> dict[str, str]:
    """Return field name -> name in config.json."""
    return {field.name: field.encode_name for field in msgspec.structs.fields(config)}

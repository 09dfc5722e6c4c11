"""Which quantized formats work on which device. The guide has a table with more about them."""

from __future__ import annotations

from typing import Final, Literal

from aioengine.api.checks import shown

Source = Literal["quant_method", "quantization", "kv_cache_dtype"]
"""Names a format: the field in config.json, or the argument of the engine."""

_STORED: Final = "fp8", "fbgemm_fp8", "modelopt", "awq", "gptq", "bitsandbytes", "compressed-tensors", "mxfp4"
_BOTH: Final = "cpu", "cuda"

FORMATS: Final[dict[Source, dict[str, tuple[str, ...]]]] = {
    "quant_method": dict.fromkeys(_STORED, _BOTH),
    "quantization": {"fp8": ("cuda",), "int8": _BOTH, "int4": _BOTH},
    "kv_cache_dtype": {"bfloat16": _BOTH, "fp8_e4m3": ("cuda",), "int8": ("cpu",)},
}
"""Source -> name of a format -> devices on which it works."""


def check(source: Source, name: str, device: str, *, argument: str = "") -> None:
    """Raise ValueError if a format does not work on a device. The message names the formats that work there.

    argument: of the engine that named the format, if it is not ``source``.
    """
    if device not in FORMATS[source].get(name, ()):
        kind = "CPU" if device == "cpu" else "GPU"
        working = ", ".join(other for other, devices in FORMATS[source].items() if device in devices)
        raise ValueError(f"{argument or source}={shown(name)} does not work on a {kind}; allowed there: {working}")

"""Which quantized formats work on which device. The table of the guide and the errors for other formats follow it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from aioengine.api.checks import shown

if TYPE_CHECKING:
    from collections.abc import Iterator

Source = Literal["quant_method", "load_format", "quantization", "kv_cache_dtype"]
"""Names a format: the field in config.json, or the argument of the engine."""

_ONLINE: Final = "unquantized weights, quantized while loading: {}; also experts, but not in gpt-oss"
_GROUPS: Final = "a scale per group of `quantization_group_size` inputs (128)"
STORED: Final = "as stored"
WIDENED: Final = "in the `dtype`"


class Format(NamedTuple):
    """A format, and how each device keeps it in memory.

    Attributes:
        name: the value of the source.
        description: for the guide.
        gpu, cpu: how the numbers are kept in memory; "": the device refuses the format.
        layout: ``Scheme.layout`` or a type of GGUF tensors, if the name has several rows.
    """

    name: str
    description: str
    gpu: str
    cpu: str
    layout: str = ""

    def kept(self, device: str) -> str:
        """Return how "cpu" or "cuda" keeps the numbers; "": it refuses them."""
        return self.cpu if device == "cpu" else self.gpu


FORMATS: Final[dict[Source, tuple[Format, ...]]] = {
    "quant_method": (
        Format("fp8", "fp8 per tensor, or in blocks of 128 x 128", STORED, WIDENED),
        Format("fbgemm_fp8", "fp8 per channel", STORED, WIDENED),
        Format("modelopt", "fp8 per tensor, channel or block of 128 x 128", STORED, WIDENED),
        Format("awq", "4 bits, version gemm", STORED, STORED),
        Format("gptq", "4 and 8 bits, with and without `desc_act`, and the rules of `dynamic`", STORED, STORED),
        Format("bitsandbytes", "nf4 and fp4, with and without double quantization", STORED, STORED),
        Format(
            "compressed-tensors",
            "4 and 8 bits per group or channel, with and without zero points and `actorder`",
            STORED,
            STORED,
            "packed",
        ),
        Format(
            "compressed-tensors", "int8 per tensor or channel, with int8 activations per token", STORED, STORED, "int8"
        ),
        Format("compressed-tensors", "fp8 per tensor, channel or block", STORED, WIDENED, "fp8"),
        Format("mxfp4", "the experts of gpt-oss", STORED, WIDENED),
    ),
    "load_format": (  # a layout is a type of tensors
        Format("gguf", "Q4_0 in [GGUF files](gguf.md)", STORED, STORED, "Q4_0"),
        Format("gguf", "Q4_1", STORED, STORED, "Q4_1"),
        Format("gguf", "Q4_K", STORED, STORED, "Q4_K"),
        Format("gguf", "Q8_0", STORED, WIDENED, "Q8_0"),
        Format("gguf", "Q5_K", "8 bits", WIDENED, "Q5_K"),
        Format("gguf", "Q6_K", "8 bits", WIDENED, "Q6_K"),
        Format("gguf", "Q5_0, Q5_1", WIDENED, WIDENED),
    ),
    "quantization": (
        Format("fp8", _ONLINE.format("fp8 with a scale per output"), "fp8", ""),
        Format("int8", _ONLINE.format("int8 with a scale per output"), "int8", "int8"),
        Format("int4", _ONLINE.format(f"4 bits with {_GROUPS}"), "4 bits", "4 bits"),
    ),
    "kv_cache_dtype": (
        Format("bfloat16", "keys and values, with any `dtype`", "16 bits", "16 bits"),
        Format("fp8_e4m3", "keys and values", "8 bits", ""),
        Format("int8", "keys and values, with a scale per head", "", "8 bits"),
    ),
}


def working(source: Source, device: str | None = None) -> str:
    """Return the names of the formats that work on "cpu" or "cuda", or on any device, for an error."""
    return ", ".join(dict.fromkeys(row.name for row in FORMATS[source] if device is None or row.kept(device)))


def check(source: Source, name: str, device: str) -> None:
    """Raise ValueError if a format does not work on a device. The message names the formats that work there."""
    if not any(row.name == name and row.kept(device) for row in FORMATS[source]):
        kind = "CPU" if device == "cpu" else "GPU"
        raise ValueError(
            f"{source}={shown(name)} does not work on a {kind}; what works there: {working(source, device)}"
        )


def table() -> Iterator[tuple[str, ...]]:
    """Return the rows of the guide's table."""
    for source, rows in FORMATS.items():
        for row in rows:
            name = row.name if source == "quant_method" else f'{source}="{row.name}"'
            yield f"`{name}`", row.description, row.gpu or "refused", row.cpu or "refused"

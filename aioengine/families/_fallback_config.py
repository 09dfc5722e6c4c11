"""Reads the sizes of models without a family, which run with the code of transformers. Torch-free.

transformers reads the rest of config.json itself, in the scheduler process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final, cast

import msgspec

from aioengine import plugins
from aioengine.families._config import Family, Task, TransformerConfig
from aioengine.families._fields import check_sizes, not_implemented
from aioengine.families._rope_config import RopeConfig

_NAMES: Final = {
    "vocab_size": ("vocab_size", "padded_vocab_size", "n_vocab"),
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim", "n_embed"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_transformer_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "head_dim": ("head_dim", "kv_channels"),
    "max_position_embeddings": (
        "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length", "max_context_length",
        "seq_length",
    ),
}  # fmt: skip
"""The usual name of a size -> all of its names."""


_NO_LINEAR: Final = frozenset((
    "embed_tokens", "embed_positions", "embed_in", "word_embeddings", "position_embeddings", "wte", "wpe", "w",
    "lm_head", "embed_out", "output", "score", "classifier",
))  # fmt: skip
"""Embeddings and heads. Their weights have the shape of a linear layer."""


_FLOAT: Final = "__float__"
"""Key of the object that transformers writes for infinity and NaN."""

_TEXT_PARTS: Final = "text_config", "llm_config", "language_config", "thinker_config"
"""Names of the text model's config in models of several parts."""

_EPSILONS: Final = ("norm_eps", "norm_epsilon", "rms_eps")
"""Suffixes of the names of a norm's epsilon."""


class _ConfigSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Raises ValueError for an impossible size."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int = 1
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048

    def __post_init__(self) -> None:
        check_sizes(self)


class _Labels(Family, frozen=True, kw_only=True):
    tasks: ClassVar[Mapping[str, Task]] = {"LMHeadModel": Task.GENERATE, **Family.tasks}


def read_fallback_config(raw: Mapping[str, object]) -> TransformerConfig:
    """Read the sizes that the engine needs.

    Raises ValueError if a size is missing or impossible, or if the task is not supported.
    """
    _check_numbers(raw)
    values: dict[str, object] = {}
    for usual, names in _NAMES.items():
        value = next((raw[name] for name in names if isinstance(raw.get(name), int)), None)
        if value is not None:
            values[usual] = value
    if raw.get("multi_query") is True and not raw.get("new_decoder_architecture"):
        values["num_key_value_heads"] = 1
    parts = [raw.get(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim")]
    if isinstance(parts[0], int) and isinstance(parts[1], int):
        values["head_dim"] = parts[0] + parts[1]
    try:
        sizes = msgspec.convert(values, _ConfigSizes)
        labels = msgspec.convert(raw, _Labels)
    except msgspec.ValidationError as error:
        where = f"config.json of model_type {raw.get('model_type')!r}"
        part = next((name for name in _TEXT_PARTS if isinstance(raw.get(name), dict)), None)
        if part is not None and "vocab_size" not in values:
            others = f"models with images work without model_impl: {', '.join(plugins.names('media/tokens'))}"
            raise ValueError(
                f"{where} has a text model in {part}; transformers' code cannot run it; {others}"
            ) from None
        raise ValueError(f"{where}, as model_impl='transformers' reads it: {error}") from error
    heads = sizes.num_attention_heads
    return TransformerConfig(
        task=labels.task,
        num_labels=labels.num_scores,
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        intermediate_size=4 * sizes.hidden_size,
        num_layers=sizes.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=sizes.num_key_value_heads or heads,
        head_size=sizes.head_dim or sizes.hidden_size // heads,
        epsilon=1e-6,
        max_position_embeddings=sizes.max_position_embeddings,
        prefix="",
        rope=_rope(raw),
    )


def _check_numbers(raw: Mapping[str, object]) -> None:
    """Raise ValueError for NaN, and for an epsilon of a norm outside of (0, 1]."""
    entries = list(raw.items())
    while entries:
        name, value = entries.pop()
        if isinstance(value, list):
            entries += [(name, item) for item in cast("list[object]", value)]
        elif isinstance(value, dict) and _FLOAT not in value:
            entries += cast("dict[str, object]", value).items()
        elif value == {_FLOAT: "NaN"}:
            not_implemented(name, value, "a number")
        elif name.endswith(_EPSILONS) and value is not None and not (isinstance(value, int | float) and 0 < value <= 1):
            not_implemented(name, value, "more than 0, at most 1")


def linear_layers(shapes: Mapping[str, tuple[int, ...]], vocab_size: int) -> dict[str, tuple[int, int]]:
    """Return name -> (outputs, inputs) of the layers that look like linear layers, judged by names and shapes.

    The runner knows the real linear layers, and refuses adapters for other layers.
    """
    layers: dict[str, tuple[int, int]] = {}
    for tensor, shape in shapes.items():
        name, _, last = tensor.rpartition(".")
        if last == "weight" and len(shape) == 2 and name.rpartition(".")[2] not in _NO_LINEAR:
            layers[name] = (shape[0], shape[1])
    return {name: shape for name, shape in layers.items() if shape[0] != vocab_size}


def _rope(raw: Mapping[str, object]) -> RopeConfig:
    """Return the RoPE scaling. Only its context length is used."""
    parameters = raw.get("rope_scaling") or raw.get("rope_parameters")
    if not isinstance(parameters, dict):
        return RopeConfig()
    kind, factor = parameters.get("rope_type", parameters.get("type")), parameters.get("factor")
    original = parameters.get("original_max_position_embeddings")
    if kind not in ("linear", "yarn") or not isinstance(factor, int | float):
        return RopeConfig()
    return RopeConfig(
        rope_type=kind,
        factor=float(factor),
        original_max_position_embeddings=original if isinstance(original, int) else None,
    )

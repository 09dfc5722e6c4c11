"""Converts the metadata and tensor names of a GGUF file to config.json and the names in a model folder.

llama.cpp's names: https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py. Unsupported metadata
that changes results is refused.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, BinaryIO, Final

from aioengine.api import checks
from aioengine.families._fields import not_implemented
from aioengine.model_files.gguf_header import GgufArray, Header, Metadata, Scalar, TensorInfo

ARCHITECTURES: Final = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""``general.architecture``, which equals the ``model_type`` -> the architecture in config.json."""

_FIELDS: Final = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
"""Keys after the architecture's name -> fields of config.json."""

_EXPECTED: Final[dict[str, tuple[object, ...]]] = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "attention.causal": (True,),
    "rope.scaling.attn_factor": (1.0,),
    "tensor_data_layout": ("Meta AI original pth",),
    "use_parallel_residual": (False,),
}
"""Keys after the architecture's name -> values that change nothing."""

_READ: Final = (
    "vocab_size",  # equals the number of rows of the embedding
    "attention.value_length",
    "rope.dimension_count",
    *(f"rope.scaling.{key}" for key in ("type", "factor", "original_context_length", "finetuned")),
)
"""Other keys that are used or checked below."""

_REQUIRED: Final = ("context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count")
"""Keys that every file has."""

EMBEDDING: Final = "model.embed_tokens"
"""The name of the token embeddings in a model folder."""
_NAMES: Final = {
    "token_embd": EMBEDDING,
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""llama.cpp's tensor names -> names in a model folder. Names in a block are without their prefixes."""

_BLOCK: Final = re.compile(r"blk\.(\d{1,6})\.(.+)\.(weight|bias)")
_ROPE_FACTORS: Final = "rope_freqs.weight"
_LLAMA3: Final = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The RoPE scaling of Llama 3.1 to 3.3. Files have the resulting frequency factors."""


def config_of(header: Header, file: BinaryIO) -> dict[str, object]:
    """Return the fields of config.json. ``file``: the open file.

    Raises ValueError, which names the key but not the file, if the model is not supported.
    """
    metadata = header.metadata
    architecture = _architecture(metadata)
    own = {
        key.removeprefix(f"{architecture}."): _single_value(key, value)
        for key, value in metadata.items()
        if key.startswith(f"{architecture}.")
    }
    _check_known(architecture, own)
    tensors = {info.name: info for info in header.tensors}
    config: dict[str, object] = {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        "dtype": _dtype(header),
        "tie_word_embeddings": "output.weight" not in tensors,
        **{field: own[key] for key, field in _FIELDS.items() if key in own},
    }
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ValueError("it has no tensor 'token_embd.weight' with two dimensions")
    config["vocab_size"] = embedding.shape[0]
    if architecture == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
        config["mlp_bias"] = "blk.0.ffn_up.bias" in tensors
    _set_head_size(architecture, own, config)
    if (rope := _rope(architecture, own, tensors.get(_ROPE_FACTORS), file)) is not None:
        config["rope_scaling"] = rope
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    config["eos_token_id"] = list(dict.fromkeys(token_id for token_id in ends if isinstance(token_id, int)))
    return config


def tensors_of(header: Header) -> dict[str, tuple[TensorInfo, int]]:
    """Return name in model folders -> tensor and ``num_heads``. Unknown tensors keep their names.

    ``num_heads``: heads of a matrix with rows in llama.cpp's order, which alternates between the two halves of a head;
    0 for any other tensor.

    Raises ValueError if the architecture is not supported, or two tensors get the same name.
    """
    num_heads: dict[str, Any] = {}
    if _architecture(header.metadata) == "llama":
        key = "llama.attention.head_count"
        counts = {name: _single_value(name, value) for name, value in header.metadata.items() if name.startswith(key)}
        num_heads = {"attn_q": counts.get(key), "attn_k": counts.get(f"{key}_kv", counts.get(key))}
    tensors: dict[str, tuple[TensorInfo, int]] = {}
    for info in header.tensors:
        stem, _, suffix = info.name.rpartition(".")
        name = f"{_NAMES[stem]}.{suffix}" if stem in _NAMES else info.name
        heads = 0
        if (match := _BLOCK.fullmatch(info.name)) is not None and match[2] in _NAMES:
            name = f"model.layers.{int(match[1])}.{_NAMES[match[2]]}.{match[3]}"
            heads = num_heads.get(match[2], 0)
        if name in tensors:
            first, second = checks.shown(tensors[name][0].name), checks.shown(info.name)
            raise ValueError(f"tensors {first} and {second} are the same tensor of the model")
        if info.name != _ROPE_FACTORS:
            tensors[name] = info, heads
    return tensors


def _architecture(metadata: Metadata) -> str:
    architecture, kind = metadata.get("general.architecture"), metadata.get("general.type", "model")
    if kind != "model":
        raise ValueError(f"general.type is {checks.shown(kind)}; allowed: 'model'")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise ValueError(
            f"general.architecture is {checks.shown(architecture)}, which is not supported in GGUF files; allowed: "
            f"{', '.join(ARCHITECTURES)}; give the folder of the original model (*.safetensors)"
        )
    if metadata.get("general.quantization_version", 2) != 2:
        version = checks.shown(metadata["general.quantization_version"])
        raise ValueError(f"general.quantization_version is {version}; allowed: 2")
    num_parts = metadata.get("split.count", 0)
    if isinstance(num_parts, int) and num_parts > 1:
        raise ValueError(f"it is one of {num_parts} parts; join them: llama-gguf-split --merge FIRST_PART NEW_FILE")
    return architecture


def _single_value(key: str, value: Scalar | GgufArray) -> Scalar:
    """Return the value of a key. An array must have the same value for all layers."""
    if isinstance(value, GgufArray):
        distinct: set[Scalar] = set(value.texts() if value.has_texts else value.numbers())
        if len(distinct) != 1:
            raise ValueError(f"{checks.shown(key)} has {len(distinct)} values; allowed: one value for all layers")
        value = distinct.pop()
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{checks.shown(key)} is {value}; allowed: a finite number")
    return value


def _check_known(architecture: str, own: Mapping[str, Scalar]) -> None:
    """Raise ValueError for a missing key, and for a value that is not implemented."""
    for key in _REQUIRED:
        if key not in own:
            raise ValueError(f"it has no {architecture}.{key}")
    for key, value in own.items():
        if key in _FIELDS or key in _READ:
            continue
        if value not in _EXPECTED.get(key, ()):
            allowed = ", ".join(map(str, _EXPECTED.get(key, ()))) or "files without it"
            not_implemented(checks.shown(f"{architecture}.{key}"), value, allowed)


def _set_head_size(architecture: str, own: Mapping[str, Scalar], config: dict[str, object]) -> None:
    """Set ``head_dim``. Raise ValueError if values differ from keys in size, or only a part of a head is rotated."""
    hidden, heads = own["embedding_length"], own["attention.head_count"]
    rotated = own.get("rope.dimension_count")
    size = own.get("attention.key_length", rotated)
    if size is None and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        size = hidden // heads
    config["head_dim"] = size
    for key in ("attention.value_length", "rope.dimension_count"):
        if own.get(key, size) != size:
            not_implemented(f"{architecture}.{key}", own[key], f"the size of a head, {checks.shown(size)}")


def _rope(
    architecture: str, own: Mapping[str, Scalar], factors: TensorInfo | None, file: BinaryIO
) -> dict[str, object] | None:
    """Return ``rope_scaling`` of config.json; None if positions are not scaled."""
    kind = own.get("rope.scaling.type", "none")
    if factors is not None:
        if kind not in {"none", "llama3"}:
            raise ValueError(
                f"it has both {_ROPE_FACTORS} and {architecture}.rope.scaling.type {checks.shown(kind)}; allowed: "
                "only one of them"
            )
        return _llama3(own, factors, file)
    if kind == "none":
        return None
    if kind not in {"linear", "yarn"}:
        not_implemented(f"{architecture}.rope.scaling.type", kind, "none, linear, yarn")
    scaling: dict[str, object] = {"rope_type": kind, "factor": own.get("rope.scaling.factor")}
    original = own.get("rope.scaling.original_context_length")
    if kind == "yarn" and original is not None:
        scaling["original_max_position_embeddings"] = original
    return scaling


def _llama3(own: Mapping[str, Scalar], info: TensorInfo, file: BinaryIO) -> dict[str, object] | None:
    """Return the scaling of Llama 3.1 to 3.3 that gives the factors in the file, one per pair of a head's elements.

    Returns None if all factors are 1. Raises ValueError for other factors.
    """
    if info.kind != "F32" or info.num_bytes > 1 << 16:
        raise ValueError(
            f"{_ROPE_FACTORS} is of type {info.kind} and has {info.num_bytes} bytes; allowed: F32, up to {1 << 16}"
        )
    file.seek(info.begin)
    content = file.read(info.num_bytes)
    if len(content) != info.num_bytes:
        raise ValueError("it was changed while it was read")
    factors = struct.unpack(f"<{info.num_bytes // 4}f", content)
    if all(factor == 1 for factor in factors):
        return None
    scaling, theta = {"factor": round(max(factors), 4), **_LLAMA3}, own.get("rope.freq_base", 10_000.0)
    is_usual = 1 < scaling["factor"] < 1e6 and isinstance(theta, float) and 1 < theta < math.inf
    expected = _llama3_factors(scaling["factor"], float(theta), len(factors)) if is_usual else ()
    if not is_usual or not all(map(partial(math.isclose, rel_tol=1e-4), factors, expected)):
        raise ValueError(f"{_ROPE_FACTORS} has factors that are not implemented; allowed: as in Llama 3.1 to 3.3")
    return {"rope_type": "llama3", **scaling}


def _llama3_factors(factor: float, theta: float, num_factors: int) -> Iterator[float]:
    """Yield the divisor of each frequency, as rope_type 'llama3' of transformers computes it."""
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    for index in range(num_factors):
        turns = _LLAMA3["original_max_position_embeddings"] * theta ** (-index / num_factors) / (2 * math.pi)
        share = min(max((turns - low) / (high - low), 0.0), 1.0)
        yield 1 / ((1 - share) / factor + share)


def _dtype(header: Header) -> str:
    """Return the dtype of the matrices; bfloat16 if they are quantized."""
    kinds = {info.kind for info in header.tensors if len(info.shape) > 1}
    if kinds <= {"F32"}:
        return "float32"
    return "float16" if kinds <= {"F16", "F32"} else "bfloat16"

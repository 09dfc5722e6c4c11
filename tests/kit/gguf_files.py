"""Writes GGUF files: any header, and tiny models with weights of every supported type."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

KINDS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 8, "Q4_K": 12, "Q6_K": 14, "BF16": 30}
ALIGNMENT = 32
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


class Stored(NamedTuple):
    """A tensor in the format of a file. ``shape``: in the order of torch."""

    kind: int
    shape: tuple[int, ...]
    content: bytes


def _text(value: str) -> bytes:
    content = value.encode()
    return struct.pack("<Q", len(content)) + content


def _scalar(value: object) -> tuple[int, bytes]:
    """Return the number of the type of this value, and its bytes."""
    if isinstance(value, bool):
        return 7, struct.pack("<?", value)
    if isinstance(value, int):
        return (4, struct.pack("<I", value)) if value >= 0 else (5, struct.pack("<i", value))
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    return 8, _text(str(value))


def value_bytes(value: object) -> bytes:
    if not isinstance(value, list | tuple):
        kind, content = _scalar(value)
        return struct.pack("<I", kind) + content
    items = [_scalar(item) for item in value]
    kind = items[0][0] if items else 8
    return struct.pack("<IIQ", 9, kind, len(items)) + b"".join(content for _, content in items)


def write_gguf(path: Path, metadata: Mapping[str, object], tensors: Mapping[str, Stored], version: int = 3) -> Path:
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, value in metadata.items():
        header += _text(key) + value_bytes(value)
    body = b""
    for name, (kind, shape, content) in tensors.items():
        body += b"\0" * (-len(body) % ALIGNMENT)
        header += _text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *reversed(shape))
        header += struct.pack("<IQ", kind, len(body))
        body += content
    path.write_bytes(header + b"\0" * (-len(header) % ALIGNMENT) + body)
    return path


# ---------------------------------------------------------------- weights


def stored(tensor: Tensor, kind: str) -> tuple[Stored, Tensor]:
    """Convert tensor [...] to blocks of a type. Return the blocks, and their values in fp32."""
    values = tensor.float().contiguous()
    if kind in {"F32", "F16", "BF16"}:
        rounded = values.to({"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind])
        return Stored(KINDS[kind], tuple(tensor.shape), rounded.view(torch.uint8).numpy().tobytes()), rounded.float()
    form = {"Q4_0": _q4_0, "Q8_0": _q8_0, "Q4_K": _q4_k, "Q6_K": _q6_k}[kind]
    content, numbers = form(values.numpy().reshape(-1, 256 if kind.endswith("K") else 32))
    return Stored(KINDS[kind], tuple(tensor.shape), content.tobytes()), torch.from_numpy(numbers).view(tensor.shape)


def _half(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Round values [N] to fp16. Return their bytes [N, 2], and their values in fp32 [N]."""
    short = values.astype(np.float16)
    return short.view(np.uint8).reshape(-1, 2), short.astype(np.float32)


def _divided(values: np.ndarray, by: np.ndarray) -> np.ndarray:
    return np.rint(values / np.where(by == 0, 1, by))


def _q8_0(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scale, d = _half(np.abs(x).max(1) / 127)
    q = np.clip(_divided(x, d[:, None]), -127, 127).astype(np.int8)
    return np.concatenate([scale, q.view(np.uint8)], 1), d[:, None] * q.astype(np.float32)


def _q4_0(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scale, d = _half(np.abs(x).max(1) / 7)
    q = np.clip(_divided(x, d[:, None]) + 8, 0, 15).astype(np.uint8)
    return np.concatenate([scale, q[:, :16] | q[:, 16:] << 4], 1), d[:, None] * (q.astype(np.float32) - 8)


def _q6_k(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    groups = x.reshape(-1, 16, 16)
    wanted = np.abs(groups).max(2) / 31
    half, d = _half(wanted.max(1) / 127)
    scales = _divided(wanted, d[:, None]).astype(np.int8)
    group_scales = (d[:, None] * scales)[:, :, None]
    q = np.clip(_divided(groups, group_scales) + 32, 0, 63).astype(np.uint8)
    parts = q.reshape(-1, 2, 4, 32)  # halves of a block, and places of two bits in a byte
    low = np.concatenate(
        [parts[:, :, 0] & 15 | (parts[:, :, 2] & 15) << 4, parts[:, :, 1] & 15 | (parts[:, :, 3] & 15) << 4], 2
    )
    high = np.bitwise_or.reduce((parts >> 4) << np.arange(0, 8, 2, dtype=np.uint8)[:, None], axis=2)
    content = np.concatenate([low.reshape(-1, 128), high.reshape(-1, 64), scales.view(np.uint8), half], 1)
    return content.astype(np.uint8), group_scales * (q.astype(np.float32) - 32)


def _q4_k(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    groups = x.reshape(-1, 8, 32)
    lowest = np.maximum(-groups.min(2), 0)
    wanted = (groups.max(2) + lowest) / 15
    (half, d), (half_min, d_min) = _half(wanted.max(1) / 63), _half(lowest.max(1) / 63)
    scales = np.clip(_divided(wanted, d[:, None]), 0, 63).astype(np.uint8)
    minima = np.clip(_divided(lowest, d_min[:, None]), 0, 63).astype(np.uint8)
    group_scales, minimum = (d[:, None] * scales)[:, :, None], (d_min[:, None] * minima)[:, :, None]
    q = np.clip(_divided(groups + minimum, group_scales), 0, 15).astype(np.uint8)
    packed = [
        scales[:, :4] | (scales[:, 4:] >> 4) << 6,
        minima[:, :4] | (minima[:, 4:] >> 4) << 6,
        scales[:, 4:] & 15 | (minima[:, 4:] & 15) << 4,
    ]
    pairs = q.reshape(-1, 4, 2, 32)
    content = np.concatenate([half, half_min, *packed, (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)], 1)
    return content, group_scales * q.astype(np.float32) - minimum


# ---------------------------------------------------------------- models and tokenizers


def model_metadata(config: Mapping[str, object]) -> dict[str, object]:
    """Return the metadata for config.json of a family."""
    kind, rope = config["model_type"], config.get("rope_parameters") or {}
    assert isinstance(rope, dict)
    fields = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "rope.dimension_count": config["head_dim"],
        "rope.freq_base": float(rope.get("rope_theta", 1e4)),
    }
    own = {f"{kind}.{key}": value for key, value in fields.items()}
    return {"general.architecture": kind, "general.alignment": ALIGNMENT, **own}


def write_model(
    path: Path,
    config: Mapping[str, object],
    state: Mapping[str, Tensor],
    kind: str,
    more: Mapping[str, object] | None = None,
    *,
    kind_of_vectors: str = "F32",
    other_kinds: Mapping[str, str] | None = None,
) -> dict[str, Tensor]:
    """Write a model of transformers as a GGUF file. Return its rounded weights.

    Args:
        config: with head_dim.
        kind: the type of matrices.
        more: metadata.
        kind_of_vectors: the type of norms and biases.
        other_kinds: last part of the names of layers -> the type of their matrices.
    """
    tensors: dict[str, Stored] = {}
    values: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        turned = _interleave_halves(name, tensor, config) if config["model_type"] == "llama" else tensor
        kind_of_matrix = (other_kinds or {}).get(name.split(".")[-2], kind)
        tensors[_name(name)], numbers = stored(turned, kind_of_matrix if tensor.dim() > 1 else kind_of_vectors)
        if turned is not tensor:
            places = _interleave_halves(name, torch.arange(len(tensor))[:, None], config)[:, 0]
            back = torch.empty_like(numbers)
            back[places] = numbers
            numbers = back
        values[name] = numbers
    write_gguf(path, {**model_metadata(config), **(more or {})}, tensors)
    return values


def _interleave_halves(name: str, rows: Tensor, config: Mapping[str, object]) -> Tensor:
    """Reorder rows [R, C] of queries or keys as llama.cpp does for Llama."""
    field = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    if field is None:
        return rows
    heads = config[field]
    assert isinstance(heads, int)
    return rows.view(heads, 2, len(rows) // heads // 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[part]}.{suffix}"
    return f"{NAMES.get(stem, stem)}.{suffix}"


def byte_tokenizer(merges: Sequence[str], special: Sequence[str], num_tokens: int = 0) -> dict[str, object]:
    """Return the metadata of a gpt2 tokenizer with bytes, merged tokens, special tokens and unused tokens."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    letters = [chr(byte) for byte in visible] + [chr(256 + place) for place in range(len(hidden))]
    tokens = [*letters, *(merge.replace(" ", "") for merge in merges), *special]
    types = [1] * (len(tokens) - len(special)) + [3] * len(special)
    unused = [f"[PAD{place}]" for place in range(len(tokens), num_tokens)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens + unused,
        "tokenizer.ggml.token_type": types + [5] * len(unused),
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.eos_token_id": tokens.index(special[0]),
    }


def word_tokenizer(words: Sequence[str]) -> dict[str, object]:
    """Return the metadata of a llama tokenizer with special tokens, bytes, letters, and words with scores."""
    letters = sorted(set("".join(words)))
    pieces = [*dict.fromkeys([*words, *letters])]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(place) for place in range(len(pieces))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }

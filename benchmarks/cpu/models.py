"""Model folders with random weights for the benchmarks: real architecture configs, a made-up tokenizer."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import gguf
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen2Config

from benchmarks.tokenizer_files import write_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

QWEN25_05B = Qwen2Config(
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    vocab_size=151936,
    max_position_embeddings=32768,
    tie_word_embeddings=True,
    bos_token_id=151643,
    eos_token_id=151645,
)
TINY = Qwen2Config(
    hidden_size=256,
    intermediate_size=704,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=4096,
    max_position_embeddings=4096,
    tie_word_embeddings=True,
    bos_token_id=4094,
    eos_token_id=4095,
)


def write_config(folder: Path, config: Qwen2Config) -> Path:
    """Write config and tokenizer of the model, without weights, unless the folder has them. Return the folder."""
    if not (folder / "tokenizer.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        config.architectures = ["Qwen2ForCausalLM"]
        config.save_pretrained(folder)
        write_tokenizer(folder, config.vocab_size, eos_token_id=config.eos_token_id)
    return folder


def write_model(folder: Path, config: Qwen2Config, *, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write the model with seeded random weights unless the folder has it already; returns the folder."""
    if (folder / "model.safetensors").exists():
        return folder
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder)
    write_tokenizer(folder, config.vocab_size, eos_token_id=config.eos_token_id)
    return folder


def write_gguf(folder: Path, config: Qwen2Config, kind: str) -> Path:
    """Write the model of ``write_model`` as a GGUF file, unless there is one; returns its path.

    ``kind``: BF16, F16, Q8_0 or Q4_0. The embedding is in at least 8 bits.
    """
    path = folder / f"{kind}.gguf"
    if path.exists():
        return path
    writer = GGUFWriter(path, "qwen2")
    writer.add_file_type(gguf.LlamaFileType["MOSTLY_" + kind])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    ids = model["model"]["vocab"] | {token["content"]: token["id"] for token in model["added_tokens"]}
    tokens = {index: token for token, index in ids.items()}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([tokens.get(index, f"<|unused_{index}|>") for index in range(config.vocab_size)])
    writer.add_token_types([1] * config.vocab_size)
    writer.add_token_merges([" ".join(pair) for pair in model["model"]["merges"]])
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config.num_hidden_layers)
    for name, tensor in load_file(folder / "model.safetensors").items():
        own_kind = kind if tensor.dim() > 1 else "F32"
        if own_kind == "Q4_0" and "embed" in name:
            own_kind = "Q8_0"
        number = GGMLQuantizationType[own_kind]
        data = gguf.quants.quantize(tensor.float().numpy(), number)
        writer.add_tensor(str(names.get_name(name, (".weight", ".bias"))), data, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

"""Model folders without weights for the GPU workloads: the shapes of Qwen3-0.6B, Llama-3.1-8B and others.

This does not import torch: a garbage collection of its objects takes 0.1 s of the process that reads the streams.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from benchmarks.tokenizer_files import write_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

SMALL: dict[str, object] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "max_position_embeddings": 40_960,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "eos_token_id": 151645,
    "bos_token_id": 151643,
}
LARGE: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "max_position_embeddings": 131_072,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "eos_token_id": 128001,
    "bos_token_id": 128000,
}
LITE: dict[str, object] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "dtype": "bfloat16",
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "first_k_dense_replace": 1,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
    "max_position_embeddings": 163_840,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "eos_token_id": 100001,
    "bos_token_id": 100000,
}
HALF_NEXT: dict[str, object] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "dtype": "bfloat16",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 24,
    "full_attention_interval": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000_000,
    "max_position_embeddings": 262_144,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "eos_token_id": 151645,
    "bos_token_id": 151643,
}
"""Half of the layers of Qwen3-Next-80B-A3B."""
EXPERTS: dict[str, object] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "dtype": "bfloat16",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "max_position_embeddings": 40_960,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "eos_token_id": 151645,
    "bos_token_id": 151643,
}
OSS: dict[str, object] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "dtype": "bfloat16",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "swiglu_limit": 7.0,
    "attention_bias": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": False,
    "eos_token_id": 200002,
    "bos_token_id": 199998,
}
"""gpt-oss-20b with experts in bf16."""
WINDOWED: dict[str, object] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "dtype": "bfloat16",
    "vocab_size": 262208,
    "hidden_size": 3840,
    "intermediate_size": 15360,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "rope_local_base_freq": 10_000,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "max_position_embeddings": 131_072,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "eos_token_id": 106,
    "bos_token_id": 2,
}
"""The text model of gemma-3-12b."""
MODELS = {
    "a": SMALL,
    "b": LARGE,
    "a3b": EXPERTS,
    "oss": OSS,
    "gemma": WINDOWED,
    "lite": LITE,
    "next": HALF_NEXT,
}


def write_folder(folder: Path, name: str) -> Path:
    """The folder of one of ``MODELS``, written unless it is there."""
    target = folder / name
    if (target / "tokenizer.json").exists():
        return target
    target.mkdir(parents=True, exist_ok=True)
    config = MODELS[name]
    (target / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    vocab_size, end = config["vocab_size"], config["eos_token_id"]
    assert isinstance(vocab_size, int)
    assert isinstance(end, int)
    write_tokenizer(target, vocab_size, eos_token_id=end)
    return target

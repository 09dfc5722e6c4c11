"""Relevant fields of config.json files on the hub, written by several versions of transformers."""

from __future__ import annotations

FACTORS = {"long_factor": [1.0 + i for i in range(48)], "short_factor": [1.0 + i / 8 for i in range(48)]}
SIZES = {"hidden_size": 768, "intermediate_size": 1024, "num_hidden_layers": 6, "vocab_size": 512}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}

LATENT: dict[str, object] = {
    "num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "rms_norm_eps": 1e-06, "attention_bias": False,
}  # fmt: skip

HUB: dict[str, dict[str, object]] = {
    "gemma-2-2b-it": {
        **SIZES, **HEADS, "model_type": "gemma2", "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        "cache_implementation": "hybrid", "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 8192, "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 4096,
    },
    "gemma-3-1b-it": {
        **SIZES, **HEADS, "model_type": "gemma3_text", "attn_logit_softcapping": None, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 32768, "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512,
        "sliding_window_pattern": 6,
    },
    "gemma-3-12b-it, its text_config": {
        **SIZES, **HEADS, "model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "Phi-3-mini-4k-instruct": {
        **SIZES, **HEADS, "model_type": "phi3", "max_position_embeddings": 4096, "rope_scaling": None,
        "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 2047,
    },
    "Phi-3-mini-128k-instruct": {
        **SIZES, **HEADS, "model_type": "phi3", "max_position_embeddings": 131072, "sliding_window": 262144,
        "original_max_position_embeddings": 4096, "rope_scaling": {**FACTORS, "type": "longrope"},
    },
    "Phi-4-mini-instruct": {
        **SIZES, "num_attention_heads": 6, "model_type": "phi3", "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75, "tie_word_embeddings": True,
        "rope_scaling": {**FACTORS, "type": "longrope"}, "sliding_window": 262144,
    },
    "c4ai-command-r7b-12-2024": {
        **SIZES, **HEADS, "model_type": "cohere2", "cache_implementation": "hybrid", "head_dim": 96,
        "layer_norm_eps": 1e-05, "layer_switch": 4, "logit_scale": 0.25, "order_of_interleaved_layers":
        "local_attn_first", "position_embedding_type": "rope_gptj", "rope_scaling": None, "rope_theta": 50000,
        "rotary_pct": 1.0, "sliding_window": 4096, "sliding_window_pattern": 4, "use_qk_norm": False,
    },
    "SmolLM3-3B": {
        **SIZES, **HEADS, "model_type": "smollm3", "max_position_embeddings": 65536, "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0, 1, 1], "layer_types": ["full_attention"] * 6, "rope_scaling": None,
        "rope_theta": 5000000.0, "sliding_window": None, "use_sliding_window": False, "pretraining_tp": 2,
    },
    "granite-3.3-2b-instruct": {
        **SIZES, **HEADS, "model_type": "granite", "attention_multiplier": 0.015625, "embedding_multiplier": 12.0,
        "logits_scaling": 8.0, "residual_multiplier": 0.22, "rope_scaling": None, "rope_theta": 10000000.0,
        "tie_word_embeddings": True,
    },
    "OLMo-2-1124-7B": {**SIZES, **HEADS, "model_type": "olmo2", "rms_norm_eps": 1e-06, "rope_theta": 500000},
    "GLM-4-9B-0414": {
        **SIZES, **HEADS, "model_type": "glm4", "attention_bias": True, "head_dim": 128, "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "max_position_embeddings": 32768,
    },
    "gpt2": {
        "model_type": "gpt2", "activation_function": "gelu_new", "layer_norm_epsilon": 1e-05, "n_ctx": 1024,
        "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257,
    },
    "pythia-160m": {
        **SIZES, "model_type": "gpt_neox", "hidden_act": "gelu", "layer_norm_eps": 1e-05, "num_attention_heads": 12,
        "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False, "use_parallel_residual": True,
    },
    "falcon-7b": {
        "model_type": "falcon", "alibi": False, "apply_residual_connection_post_layernorm": False, "bias": False,
        "hidden_size": 4544, "layer_norm_epsilon": 1e-05, "multi_query": True, "new_decoder_architecture": False,
        "num_attention_heads": 71, "num_hidden_layers": 32, "parallel_attn": True, "vocab_size": 65024,
    },
    "falcon-11B": {
        **SIZES, "model_type": "falcon", "ffn_hidden_size": 3072, "multi_query": True, "num_attention_heads": 8,
        "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1, "parallel_attn": True,
        "rope_theta": 500042.0, "rope_scaling": None, "tie_word_embeddings": False, "max_position_embeddings": 8192,
    },
    "phi-2": {
        **SIZES, "model_type": "phi", "hidden_act": "gelu_new", "layer_norm_eps": 1e-05, "num_attention_heads": 12,
        "num_key_value_heads": 12, "partial_rotary_factor": 0.5, "qk_layernorm": False, "rope_scaling": None,
    },
    "stablelm-2-12b": {
        **SIZES, **HEADS, "model_type": "stablelm", "layer_norm_eps": 1e-05, "partial_rotary_factor": 0.25,
        "qk_layernorm": True, "use_parallel_residual": True, "use_qkv_bias": False, "rope_theta": 10000,
    },
    "starcoder2-3b": {
        **SIZES, **HEADS, "model_type": "starcoder2", "activation_function": "gelu_pytorch_tanh", "mlp_type": "default",
        "hidden_act": "gelu_pytorch_tanh", "norm_epsilon": 1e-05, "norm_type": "layer_norm", "sliding_window": 4096,
        "rope_theta": 999999.4420358813, "use_bias": True,
    },
    "MiniCPM3-4B": {
        **SIZES, "num_attention_heads": 8, "num_key_value_heads": 8, "model_type": "minicpm3", "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32, "q_lora_rank": 768, "kv_lora_rank": 256, "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-05, "hidden_act": "silu", "scale_emb": 12, "dim_model_base": 256, "scale_depth": 1.4,
        "rope_scaling": {
            "type": "longrope", "long_factor": [1.0 + i for i in range(16)],
            "short_factor": [1.0 + i / 8 for i in range(16)], "original_max_position_embeddings": 32768,
        },
    },
    "Youtu-LLM-2B": {
        **SIZES, **LATENT, "model_type": "youtu", "q_lora_rank": 1536, "max_position_embeddings": 131072,
        "rope_theta": 1600000, "rope_scaling": None, "rope_interleave": True, "tie_word_embeddings": True,
    },
    "DeepSeek-V2-Lite": {
        **SIZES, **LATENT, "model_type": "deepseek_v2", "first_k_dense_replace": 1, "moe_layer_freq": 1,
        "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2,
        "norm_topk_prob": False, "num_experts_per_tok": 6, "q_lora_rank": None, "max_position_embeddings": 163840,
        "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "topk_group": 1,
        "topk_method": "greedy",
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
    },
    "DeepSeek-V2": {
        **SIZES, **LATENT, "model_type": "deepseek_v2", "first_k_dense_replace": 1, "moe_layer_freq": 1,
        "moe_intermediate_size": 1536, "n_group": 8, "n_routed_experts": 160, "n_shared_experts": 2,
        "norm_topk_prob": False, "num_experts_per_tok": 6, "q_lora_rank": 1536, "max_position_embeddings": 163840,
        "rope_theta": 10000, "routed_scaling_factor": 16.0, "scoring_func": "softmax", "topk_group": 3,
        "topk_method": "group_limited_greedy",
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
    },
    "DeepSeek-V3, in bf16": {
        **SIZES, **LATENT, "model_type": "deepseek_v3", "first_k_dense_replace": 3, "moe_layer_freq": 1,
        "moe_intermediate_size": 2048, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
        "norm_topk_prob": True, "num_experts_per_tok": 8, "num_nextn_predict_layers": 1, "q_lora_rank": 1536,
        "max_position_embeddings": 163840, "rope_theta": 10000, "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid", "topk_group": 4, "topk_method": "noaux_tc",
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
    },
    "Moonlight-16B-A3B": {
        **SIZES, **LATENT, "model_type": "deepseek_v3", "first_k_dense_replace": 1, "moe_layer_freq": 1,
        "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2,
        "norm_topk_prob": True, "num_experts_per_tok": 6, "num_nextn_predict_layers": 0, "q_lora_rank": None,
        "max_position_embeddings": 8192, "rope_theta": 50000.0, "routed_scaling_factor": 2.446,
        "scoring_func": "sigmoid", "topk_group": 1, "topk_method": "noaux_tc",
    },
    "GLM-4.7-Flash": {
        **SIZES, **LATENT, "hidden_size": 2000, "num_attention_heads": 20, "num_key_value_heads": 20,
        "model_type": "glm4_moe_lite", "first_k_dense_replace": 1, "q_lora_rank": 768, "qk_nope_head_dim": 192,
        "v_head_dim": 256, "moe_intermediate_size": 1536, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 1,
        "norm_topk_prob": True, "num_experts_per_tok": 4, "num_nextn_predict_layers": 1, "rope_scaling": None,
        "max_position_embeddings": 202752, "partial_rotary_factor": 1.0, "rms_norm_eps": 1e-05,
        "rope_theta": 1000000, "routed_scaling_factor": 1.8, "topk_group": 1, "topk_method": "noaux_tc",
    },
    "c4ai-command-r-v01, without its rope_theta": {
        **SIZES, **HEADS, "model_type": "cohere", "layer_norm_eps": 1e-05, "logit_scale": 0.0625, "use_qk_norm": False,
    },
    "Mixtral-8x7B-v0.1, without its rope_theta": {
        **SIZES, **HEADS, "model_type": "mixtral", "num_experts_per_tok": 2, "num_local_experts": 8,
        "sliding_window": None,
    },
    "gpt-oss-20b, with another scaling": {
        **SIZES, **HEADS, "model_type": "gpt_oss", "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    },
    "gpt-j-6b, with the sizes of the class": {"model_type": "gptj", "activation_function": "gelu_new"},
    "gpt2, with the usual names": {
        "model_type": "gpt2", "hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 32,
    },
    "pythia, whose base is not its rope_theta": {
        **SIZES, "model_type": "gpt_neox", "num_attention_heads": 12, "rope_theta": 500.0, "rotary_emb_base": 10000,
    },
    "Qwen2.5-7B-Instruct, with its length beside the scaling": {
        **SIZES, **HEADS, "model_type": "qwen2", "original_max_position_embeddings": 4096, "rope_theta": 1000000.0,
        "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
    },
}  # fmt: skip

"""Configs of tiny decoders of all families, and random transformers models for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import AutoConfig, AutoModelForCausalLM

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

Fields = dict[str, object]

SIZES: Fields = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
_GPT2 = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "num_key_value_heads": "",
    "head_dim": "",
    "max_position_embeddings": "n_positions",
}
_RENAMED = {
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "gptj": _GPT2,
    "opt": {"num_key_value_heads": "", "head_dim": "", "intermediate_size": "ffn_dim"},
    "olmo": {"head_dim": ""},
    "gpt_neox": {"num_key_value_heads": "", "head_dim": ""},
    "phi": {"head_dim": ""},
    "starcoder2": {"head_dim": ""},
    "stablelm": {"head_dim": ""},
    "falcon": {"head_dim": "", "num_key_value_heads": "num_kv_heads", "intermediate_size": "ffn_hidden_size"},
}
"""Model type -> name of each field; "" if the family has no such field."""


def rope(rope_type: str, **parameters: object) -> Fields:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 500.0, "factor": 4.0, **parameters}}


def longrope(num_pairs: int, **parameters: object) -> Fields:
    factors = {
        "short_factor": [1.0 + 0.1 * pair for pair in range(num_pairs)],
        "long_factor": [2.0 + pair for pair in range(num_pairs)],
    }
    return rope("longrope", **factors, **parameters)


LLAMA3 = rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
YARN = rope("yarn", original_max_position_embeddings=16)
GEMMA3_ROPES = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    }
}
OLMO3_ROPES = {
    "rope_parameters": {
        "full_attention": YARN["rope_parameters"],
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    }
}
NEW_FALCON: Fields = {"new_decoder_architecture": True}
OLD_FALCON: Fields = {"parallel_attn": False, "multi_query": False, "bias": True}
GEMMA = {"head_dim": 12, "query_pre_attn_scalar": 20, "hidden_size": 72}
NO_CAPS = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
LOW_CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 9}

CASES: dict[str, tuple[str, Fields]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama one kv head": ("llama", {"num_key_value_heads": 1}),
    "llama all kv heads": ("llama", {"num_key_value_heads": 6}),
    "llama wide heads": ("llama", {"head_dim": 20}),
    "llama gelu": ("llama", {"hidden_act": "gelu"}),
    "llama llama3": ("llama", LLAMA3),
    "llama linear": ("llama", rope("linear")),
    "llama yarn": ("llama", YARN),
    "llama yarn scales": (
        "llama",
        rope("yarn", original_max_position_embeddings=16, mscale=1.5, mscale_all_dim=0.5),
    ),
    "llama yarn plain": (
        "llama",
        rope("yarn", original_max_position_embeddings=16, truncate=False, attention_factor=1.2, beta_fast=8.0),
    ),
    "llama dynamic": ("llama", rope("dynamic")),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral window": ("mistral", {"sliding_window": 13}),
    "mistral window of one": ("mistral", {"sliding_window": 1}),
    "qwen2": ("qwen2", {}),
    "qwen2 windows in upper layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "qwen3 windows by layer": ("qwen3", {"head_dim": 24, "use_sliding_window": True, **WINDOWS}),
    "qwen3 biases": ("qwen3", {"attention_bias": True, "head_dim": 8}),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 12.0,
            "logits_scaling": 8.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.2,
            "tie_word_embeddings": True,
        },
    ),
    "granite biases": ("granite", {"attention_bias": True, "mlp_bias": True}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4}),
    "smollm3 windows": (
        "smollm3",
        {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 9, "attention_bias": True},
    ),
    "gemma2": ("gemma2", {**GEMMA, **LOW_CAPS, "sliding_window": 11}),
    "gemma2 no caps": ("gemma2", {**GEMMA, **NO_CAPS, "attention_bias": True}),
    "gemma3_text": ("gemma3_text", {**GEMMA, **GEMMA3_ROPES, "sliding_window": 9, "sliding_window_pattern": 2}),
    "gemma3_text kinds": ("gemma3_text", {**GEMMA, **WINDOWS, "final_logit_softcapping": 4.0}),
    "phi3": ("phi3", {}),
    "phi3 window": ("phi3", {"sliding_window": 13}),
    "phi3 longrope": (
        "phi3",
        {
            **longrope(4, original_max_position_embeddings=64, factor=None),
            "original_max_position_embeddings": 64,
            "max_position_embeddings": 512,
        },
    ),
    "phi3 partial longrope": (
        "phi3",
        {
            **longrope(3, original_max_position_embeddings=64, partial_rotary_factor=0.75, attention_factor=1.3),
            "original_max_position_embeddings": 64,
            "max_position_embeddings": 512,
        },
    ),
    "olmo2": ("olmo2", {}),
    "olmo2 yarn": ("olmo2", {**YARN, "attention_bias": True, "num_key_value_heads": 6}),
    "cohere2": ("cohere2", {"sliding_window": 9, "sliding_window_pattern": 2, "logit_scale": 0.25}),
    "cohere2 kinds": ("cohere2", {**WINDOWS, "attention_bias": True, "tie_word_embeddings": False}),
    "glm4": ("glm4", {"head_dim": 8}),
    "glm4 whole heads": ("glm4", {"head_dim": 16, "attention_bias": False, "partial_rotary_factor": 1.0}),
    "starcoder2": ("starcoder2", {}),
    "starcoder2 window": ("starcoder2", {"sliding_window": 9, "use_bias": False, "tie_word_embeddings": False}),
    "stablelm": ("stablelm", {}),
    "stablelm side by side": (
        "stablelm",
        {"use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True, "partial_rotary_factor": 0.5},
    ),
    "stablelm head norms, one kv head": ("stablelm", {"qk_layernorm": True, "num_key_value_heads": 1}),
    "phi": ("phi", {"num_key_value_heads": None}),
    "phi kv heads": ("phi", {}),
    "phi head norms": ("phi", {"qk_layernorm": True, "partial_rotary_factor": 0.25, **rope("linear")}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox one after the other": (
        "gpt_neox",
        {"use_parallel_residual": False, "attention_bias": False, "rotary_pct": 0.5, "rotary_emb_base": 100.0},
    ),
    "gpt_neox tied": ("gpt_neox", {"tie_word_embeddings": True, "rotary_pct": 1.0, "hidden_act": "gelu_fast"}),
    "falcon": ("falcon", {}),
    "falcon 40b": ("falcon", NEW_FALCON),
    "falcon 11b": ("falcon", {**NEW_FALCON, "num_ln_in_parallel_attn": 1, "tie_word_embeddings": False, "bias": True}),
    "falcon one after the other": (
        "falcon",
        {**OLD_FALCON, "num_kv_heads": 6},
    ),
    "gpt2": ("gpt2", {}),
    "gpt2 scores": ("gpt2", {"scale_attn_weights": False, "n_inner": None, "activation_function": "relu"}),
    "gemma": ("gemma", {"head_dim": 12}),
    "gemma, first files": ("gemma", {"head_dim": 12, "hidden_act": "gelu"}),
    "cohere": ("cohere", {"logit_scale": 0.25}),
    "cohere head norms": ("cohere", {"use_qk_norm": True, "attention_bias": True, "tie_word_embeddings": False}),
    "cohere head norms, one kv head": ("cohere", {"use_qk_norm": True, "num_key_value_heads": 1}),
    "glm": ("glm", {"head_dim": 8}),
    "olmo3": ("olmo3", {"sliding_window": 9, "num_hidden_layers": 4}),
    "olmo3 ropes": ("olmo3", {**WINDOWS, **OLMO3_ROPES, "num_key_value_heads": 6}),
    "exaone4": ("exaone4", {"sliding_window": 9, "sliding_window_pattern": 2}),
    "exaone4 no windows": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3, **LLAMA3}),
    "seed_oss": ("seed_oss", {"head_dim": 8}),
    "ernie4_5": ("ernie4_5", {"head_dim": 8}),
    "ernie4_5 biases": ("ernie4_5", {"head_dim": 8, "use_bias": True, "tie_word_embeddings": False}),
    "ministral": ("ministral", {**WINDOWS, "head_dim": 8}),
    "olmo": ("olmo", {}),
    "olmo clip": ("olmo", {"clip_qkv": 0.7, "attention_bias": True, "tie_word_embeddings": True}),
    "opt": ("opt", {}),
    "opt no biases": ("opt", {"enable_bias": False, "layer_norm_elementwise_affine": False}),
    "gpt_bigcode": ("gpt_bigcode", {}),
    "gpt_bigcode all heads": ("gpt_bigcode", {"multi_query": False, "n_inner": None}),
    "gptj": ("gptj", {"rotary_dim": 4}),
}
"""Case -> model type, and the fields that differ from ``SIZES``."""

HEADS_OF_64: Fields = {"hidden_size": 256, "num_attention_heads": 4, "head_dim": 64}
"""Sizes for which all GPU attention backends have kernels, for ``config_of``."""

ONE_OF_EACH = {model_type: name for name, (model_type, _) in reversed(CASES.items())}
"""Model type -> its first case."""


def config_of(case: str, **changes: object) -> PreTrainedConfig:
    """Return the config of a case. ``changes``: fields with the names of ``SIZES``."""
    model_type, differences = CASES[case]
    return AutoConfig.for_model(
        model_type, **{**_named(model_type, SIZES), **differences, **_named(model_type, changes)}
    )


def _named(model_type: str, fields: Fields) -> Fields:
    names = _RENAMED.get(model_type, {})
    return {names.get(name, name): value for name, value in fields.items() if names.get(name, name)}


def random_model(config: PreTrainedConfig, *, seed: int = 1) -> PreTrainedModel:
    """Return a transformers model in fp32 with random weights that are large enough to tell layers apart.

    Recurrent heads get a slow decay. With transformers' initial ``A_log``, a head forgets its state in one token. Its
    output is then (q k) v, and the following norm divides it by its own length: if q and k are nearly orthogonal, this
    amplifies the rounding errors of fp32 a thousandfold.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
            if name.endswith("A_log"):
                parameter.sub_(4.0)
    return model

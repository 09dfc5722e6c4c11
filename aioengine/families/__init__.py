"""Families by ``model_type``: ``PLUGIN.read`` turns config.json into a DecoderConfig or EncoderConfig."""

from typing import Final

ALIASES: Final = {
    "cohere2": "cohere:Cohere2Family",
    "deepseek_v2": "_deepseek:DeepseekV2Family",
    "deepseek_v3": "_deepseek:DeepseekV3Family",
    "gemma2": "gemma:Gemma2Family",
    "gemma3_text": "gemma:Gemma3TextFamily",
    "glm4": "glm:Glm4Family",
    "glm4_moe_lite": "_deepseek:Glm4MoeLiteFamily",
    "gpt_bigcode": "gpt2:GptBigCodeFamily",
    "gptj": "gpt2:GptJFamily",
    "granitemoe": "granite:GraniteMoeFamily",
    "granitemoehybrid": "granite:GraniteMoeHybridFamily",
    "kimi_k2": "_deepseek:DeepseekV3Family",
    "ministral": "mistral:MinistralFamily",
    "mixtral": "mistral:MixtralFamily",
    "olmo2": "olmo:Olmo2Family",
    "olmo3": "olmo:Olmo3Family",
    "olmoe": "olmo:OlmoeFamily",
    "qwen2_5_vl": "_qwen_vision:Qwen25VLFamily",
    "qwen2_moe": "qwen2:Qwen2MoeFamily",
    "qwen2_vl": "_qwen_vision:Qwen2VLFamily",
    "qwen3_5_text": "qwen3_5:Qwen35TextFamily",
    "qwen3_moe": "qwen3:Qwen3MoeFamily",
    "qwen3_vl": "_qwen_vision:Qwen3VLFamily",
    "roberta": "bert:RobertaFamily",
    "seed_oss": "llama:SeedOssFamily",
    "smolvlm": "idefics3:Idefics3Family",
    "xlm_roberta": "bert:RobertaFamily",
    "youtu": "_latent:YoutuFamily",
}
"""Model type -> "file:class", for model types that share a file."""

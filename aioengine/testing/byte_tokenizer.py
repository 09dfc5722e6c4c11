"""A tokenizer of bytes, as a Hugging Face folder: small, exact, and without a download.

Ids 0 ... 255 are the bytes of UTF-8, then come the special tokens. So every text has an encoding, text and ids can be
checked by eye, and an id can be half of a character.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

NUM_BYTES = 256
SPECIAL_TOKENS = ("<eos>", "<bos>", "<pad>", "<user>", "<assistant>")
EOS_TOKEN_ID = NUM_BYTES
BOS_TOKEN_ID = NUM_BYTES + 1
VOCAB_SIZE = NUM_BYTES + len(SPECIAL_TOKENS)
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ 'assistant' if message['role'] == 'assistant' else 'user' }}>"
    "{{ message['content'] }}<eos>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_letters() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary: printable ones for themselves."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters: list[str] = []
    num_others = 0
    for byte in range(NUM_BYTES):
        if byte in printable:
            letters.append(chr(byte))
        else:
            letters.append(chr(NUM_BYTES + num_others))
            num_others += 1
    return letters


def write_tokenizer(folder: Path, *, context_length: int = 8192) -> Path:
    """Write tokenizer.json, tokenizer_config.json, config.json and generation_config.json; returns ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "tokenizer.json": _tokenizer(),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<eos>",
            "bos_token": "<bos>",
            "pad_token": "<pad>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": context_length,
            "chat_template": CHAT_TEMPLATE,
        },
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "max_position_embeddings": context_length,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "torch_dtype": "float32",
            "eos_token_id": EOS_TOKEN_ID,
            "bos_token_id": BOS_TOKEN_ID,
        },
        "generation_config.json": {"eos_token_id": EOS_TOKEN_ID, "bos_token_id": BOS_TOKEN_ID},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")
    return folder


def _tokenizer() -> dict[str, object]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": NUM_BYTES + index,
                "content": content,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for index, content in enumerate(SPECIAL_TOKENS)
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {letter: index for index, letter in enumerate(byte_letters())},
            "merges": [],
        },
    }

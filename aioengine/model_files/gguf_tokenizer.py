"""Converts the tokenizer in a GGUF file to tokenizer.json and tokenizer_config.json.

It splits and joins text like the tokenizer that transformers creates from the same file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from aioengine.api import checks
from aioengine.families._fields import not_implemented
from aioengine.model_files.gguf_header import GgufArray, Header, Metadata

Json = dict[str, object]

_LLAMA3: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2: Final = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS: Final = {
    "default": None,
    "gpt-2": None,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "falcon3": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "megrez": _QWEN2,
    "tekken": _TEKKEN,
}
"""``tokenizer.ggml.pre`` -> the pattern that splits a text into pieces; None for the pattern of GPT-2."""
_NO_MERGES_OF_TOKENS: Final = ("llama3", "llama-v3", "llama-bpe", "falcon3", "tekken")
"""Tokenizers that do not apply merges to a piece which is a token, and add a BOS unless the file disables it. Llama 3,
Mistral Nemo and llama.cpp do the same.
"""

_CONTROL, _USER_DEFINED = 3, 4
_PLAIN: Final = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
"""Flags of added tokens."""
_NAMED: Final = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_MAX_TOKEN: Final = 256
"""Maximum characters of a token without merges in the file. We try all places to divide it."""
_MAX_CHARACTERS, _MAX_MERGES = 1 << 24, 1 << 21
"""Limits of all tokens without merges in the file. 256,000 tokens have 2 million characters and 600,000 merges."""


def has_tokenizer(header: Header) -> bool:
    """Return whether the file has a vocabulary."""
    return header.metadata.get("tokenizer.ggml.model", "none") not in ("none", "no_vocab")


def tokenizer_of(header: Header) -> Json:
    """Return the contents of tokenizer.json.

    Raises ValueError, which names the key, if the tokenizer is damaged or its kind is not implemented.
    """
    metadata = header.metadata
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        not_implemented("tokenizer.ggml.model", kind, "gpt2, llama")
    tokens = _texts(metadata, "tokenizer.ggml.tokens")
    is_bytes = kind == "gpt2"
    types = _numbers(metadata, "tokenizer.ggml.token_type", len(tokens))
    parts = _byte_bpe(metadata, tokens) if is_bytes else _character_bpe(metadata, tokens)
    return {
        "version": "1.0",
        "added_tokens": _added_tokens(tokens, types, is_bytes=is_bytes),
        "post_processor": _post_processor(metadata, tokens, adds_bos=not is_bytes or _ignores_merges(metadata)),
        **parts,
    }


def tokenizer_config_of(header: Header) -> Json:
    """Return the contents of tokenizer_config.json: the named tokens and the chat templates.

    Raises ValueError, which names the key, if a value has a wrong type.
    """
    metadata = header.metadata
    config: Json = {}
    if has_tokenizer(header):
        tokens = _texts(metadata, "tokenizer.ggml.tokens")
        for name, token in _NAMED.items():
            if (token_id := _token_id(metadata, name, len(tokens))) is not None:
                config[token] = tokens[token_id]
    templates: dict[str, str] = {}
    for key, value in metadata.items():
        if key == "tokenizer.chat_template" or key.startswith("tokenizer.chat_template."):
            if not isinstance(value, str):
                raise ValueError(f"{checks.shown(key)} must be a string")
            templates[key.removeprefix("tokenizer.chat_template").removeprefix(".") or "default"] = value
    if templates:
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    return config


def _byte_bpe(metadata: Metadata, tokens: list[str]) -> Json:
    """Return a BPE over bytes. Each byte is written as one character."""
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in _SPLITS:
        not_implemented("tokenizer.ggml.pre", name, ", ".join(_SPLITS))
    spelling = _byte_spelling()
    characters = set(spelling.values())
    vocab = {
        token if characters.issuperset(token) else "".join(spelling[byte] for byte in token.encode()): token_id
        for token_id, token in enumerate(tokens)
    }
    split = _SPLITS[str(name)]
    steps: list[Json] = [
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": split is None}
    ]
    if split is not None:
        steps.insert(0, {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False})
    return {
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe(vocab, _merges(metadata), ignore_merges=_ignores_merges(metadata)),
    }


def _ignores_merges(metadata: Metadata) -> bool:
    return metadata.get("tokenizer.ggml.pre") in _NO_MERGES_OF_TOKENS


def _character_bpe(metadata: Metadata, tokens: list[str]) -> Json:
    """Return a BPE over characters as in sentencepiece. A space is U+2581; unknown characters become bytes."""
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if "tokenizer.ggml.merges" in metadata:
        merges = _merges(metadata)
    else:
        merges = _merges_by_score(vocab, tokens, _numbers(metadata, "tokenizer.ggml.scores", len(tokens)))
    unknown = _token_id(metadata, "unknown", len(tokens))
    steps: list[Json] = [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    has_space = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    if has_space:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    scheme = "first" if has_space else "never"
    return {
        "pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme, "split": False},
        "decoder": {"type": "Sequence", "decoders": steps},
        "model": _bpe(
            vocab, merges, unk_token=None if unknown is None else tokens[unknown], fuse_unk=True, byte_fallback=True
        ),
    }


def _bpe(vocab: Mapping[str, int], merges: Sequence[tuple[str, str]], **options: object) -> Json:
    return {"type": "BPE", "vocab": vocab, "merges": merges, **options}


def _merges(metadata: Metadata) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    for merge in _texts(metadata, "tokenizer.ggml.merges"):
        left, space, right = merge.partition(" ")
        if not (left and space and right) or " " in right:
            raise ValueError(f"tokenizer.ggml.merges has {checks.shown(merge)}, which is not two parts with a space")
        merges.append((left, right))
    return merges


def _merges_by_score(vocab: Mapping[str, int], tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return all ways to divide a token into two tokens, in descending order of scores."""
    longest = max(map(len, tokens), default=0)
    if longest > _MAX_TOKEN:
        raise ValueError(f"tokenizer.ggml.tokens has a token of {longest} characters; the limit is {_MAX_TOKEN}")
    if (size := sum(map(len, tokens))) > _MAX_CHARACTERS:
        raise ValueError(f"tokenizer.ggml.tokens has {size} characters and no merges; the limit is {_MAX_CHARACTERS}")
    score_of = dict(zip(tokens, scores, strict=False))
    merges: list[tuple[float, int, int, str, str]] = []
    for token, score in score_of.items():
        pairs = [(token[:index], token[index:]) for index in range(1, len(token))]
        known = [(left, right) for left, right in pairs if left in vocab and right in vocab]
        known.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        merges += [(score, len(left), len(right), left, right) for left, right in known]
        if len(merges) > _MAX_MERGES:
            raise ValueError(f"tokenizer.ggml.tokens has more merges than the limit of {_MAX_MERGES}")
    merges.sort(key=lambda merge: merge[:3], reverse=True)
    return [(left, right) for *_, left, right in merges]


def _added_tokens(tokens: Sequence[str], types: Sequence[float], *, is_bytes: bool) -> list[Json]:
    """Return the tokens that are never split: control tokens, which are special, and tokens of the user."""
    characters = set(_byte_spelling().values())
    added: dict[str, Json] = {}
    for token_id, (token, kind) in enumerate(zip(tokens, types, strict=False)):
        is_special = kind == _CONTROL and (not is_bytes or characters.issuperset(token))
        if (is_special or kind == _USER_DEFINED) and token:
            added[token] = {"id": token_id, "content": token, "special": is_special, **_PLAIN}
    return list(added.values())


def _post_processor(metadata: Metadata, tokens: Sequence[str], *, adds_bos: bool) -> Json:
    """Return the part that adds BOS and EOS to a text. ``adds_bos``: the default if the file does not decide."""
    single: list[Json] = [{"Sequence": {"id": "A", "type_id": 0}}]
    pair: list[Json] = [{"Sequence": {"id": "B", "type_id": 1}}]
    special: dict[str, Json] = {}
    for name, default in (("bos", adds_bos), ("eos", False)):
        token_id = _token_id(metadata, name, len(tokens))
        if token_id is None or not metadata.get(f"tokenizer.ggml.add_{name}_token", default):
            continue
        token = tokens[token_id]
        special[token] = {"id": token, "ids": [token_id], "tokens": [token]}
        for place, pieces in enumerate((single, pair)):
            piece: Json = {"SpecialToken": {"id": token, "type_id": place}}
            pieces.insert(0 if name == "bos" else len(pieces), piece)
    return {"type": "TemplateProcessing", "single": single, "pair": [*single, *pair], "special_tokens": special}


def _token_id(metadata: Metadata, name: str, num_tokens: int) -> int | None:
    """Return the id of a named token; None if there is none."""
    key = f"tokenizer.ggml.{name}_token_id"
    token_id = metadata.get(key)
    if token_id is None or token_id == 2**32 - 1:  # some converters write this number for no token
        return None
    if not isinstance(token_id, int) or not 0 <= token_id < num_tokens:
        raise ValueError(f"{key} is {checks.shown(token_id)}; there are {num_tokens} tokens")
    return token_id


def _texts(metadata: Metadata, key: str) -> list[str]:
    array = metadata.get(key)
    if not isinstance(array, GgufArray):
        raise ValueError(f"it has no array {key}")
    return array.texts()


def _numbers(metadata: Metadata, key: str, num_items: int) -> tuple[float, ...]:
    """Return one number per token; zeros if the file has none."""
    array = metadata.get(key)
    if array is None:
        return (0.0,) * num_items
    if not isinstance(array, GgufArray) or array.num_items != num_items:
        raise ValueError(f"{key} must be an array of {num_items} numbers, one per token")
    return array.numbers()


def _byte_spelling() -> dict[int, str]:
    """Return the character of each byte in vocabularies of GPT-2: itself if it is visible, else one from U+0100 on."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in visible)
    return {byte: chr(byte) for byte in visible} | {byte: chr(256 + index) for index, byte in enumerate(others)}

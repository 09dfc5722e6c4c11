"""The tokenizer in a GGUF file, as a model folder holds it: tokenizer.json and tokenizer_config.json.

Text is split and joined as by the tokenizer that transformers makes of the same file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from aioengine.api import checks
from aioengine.model_files.gguf_header import Array

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from aioengine.model_files.gguf_header import Header, Scalar

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
"""``tokenizer.ggml.pre`` -> the pattern of the pieces that a text is split into; None: that of GPT-2."""
_WHOLE_FIRST: Final = ("llama3", "llama-v3", "llama-bpe", "falcon3", "tekken")
"""Those where a piece that is a token is one, whatever the merges make of it, and that begin with a BOS unless the file
says otherwise: so do the tokenizers of Llama 3 and Mistral Nemo, and llama.cpp.
"""

_CONTROL, _USER_DEFINED = 3, 4
_NAMED: Final = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_MAX_TOKEN: Final = 256
"""Characters of a token of a vocabulary without merges, which are found by dividing it everywhere."""
_MAX_CHARACTERS, _MAX_MERGES = 1 << 24, 1 << 21
"""Of such a vocabulary in all, and the merges that are found: 256,000 tokens have some 2 million and 600,000."""


def has_tokenizer(header: Header) -> bool:
    """Whether the file has a vocabulary."""
    return header.metadata.get("tokenizer.ggml.model", "none") not in ("none", "no_vocab")


def tokenizer_of(header: Header) -> Json:
    """The contents of tokenizer.json.

    Raises:
        ValueError: the tokenizer is of a kind that is not implemented, or damaged; the message names the key.
    """
    metadata = header.metadata
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ValueError(f"tokenizer.ggml.model {checks.shown(kind)} is not implemented; what works: gpt2, llama")
    tokens = _texts(metadata, "tokenizer.ggml.tokens")
    is_bytes = kind == "gpt2"
    added = _added_tokens(tokens, _numbers(metadata, "tokenizer.ggml.token_type", len(tokens)), is_bytes=is_bytes)
    parts = _of_bytes(metadata, tokens) if is_bytes else _of_words(metadata, tokens)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "post_processor": _post_processor(metadata, tokens, adds_bos=not is_bytes or _is_whole_first(metadata)),
        **parts,
    }


def tokenizer_config_of(header: Header) -> Json:
    """The contents of tokenizer_config.json: the named tokens, and the chat templates.

    Raises:
        ValueError: a value is of a wrong type; the message names the key.
    """
    metadata = header.metadata
    found: Json = {}
    if has_tokenizer(header):
        tokens = _texts(metadata, "tokenizer.ggml.tokens")
        for name, token in _NAMED.items():
            if (token_id := _token_id(metadata, name, len(tokens))) is not None:
                found[token] = tokens[token_id]
    templates: dict[str, str] = {}
    for key, value in metadata.items():
        if key == "tokenizer.chat_template" or key.startswith("tokenizer.chat_template."):
            if not isinstance(value, str):
                raise ValueError(f"{checks.shown(key)} is no text")
            templates[key.removeprefix("tokenizer.chat_template").removeprefix(".") or "default"] = value
    if templates:
        found["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    return found


def _of_bytes(metadata: Mapping[str, Scalar | Array], tokens: list[str]) -> Json:
    """A BPE over bytes, each of which is written as one character."""
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in _SPLITS:
        raise ValueError(
            f"tokenizer.ggml.pre {checks.shown(name)} is not implemented; what works: {', '.join(_SPLITS)}"
        )
    spelling = _byte_spelling()
    letters = set(spelling.values())
    vocab = {
        token if letters.issuperset(token) else "".join(spelling[byte] for byte in token.encode()): token_id
        for token_id, token in enumerate(tokens)
    }
    split = _SPLITS[str(name)]
    to_bytes: Json = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": split is None}
    before: Json = to_bytes
    if split is not None:
        by_pattern = {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False}
        before = {"type": "Sequence", "pretokenizers": [by_pattern, to_bytes]}
    return {
        "pre_tokenizer": before,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe(vocab, _merges(metadata), ignore_merges=_is_whole_first(metadata)),
    }


def _is_whole_first(metadata: Mapping[str, Scalar | Array]) -> bool:
    return metadata.get("tokenizer.ggml.pre") in _WHOLE_FIRST


def _of_words(metadata: Mapping[str, Scalar | Array], tokens: list[str]) -> Json:
    """A BPE over characters, of sentencepiece: a space is U+2581, and what is unknown becomes bytes."""
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
    return {"type": "BPE", "dropout": None, "vocab": vocab, "merges": merges, **options}


def _merges(metadata: Mapping[str, Scalar | Array]) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for merge in _texts(metadata, "tokenizer.ggml.merges"):
        left, space, right = merge.partition(" ")
        if not (left and space and right) or " " in right:
            raise ValueError(f"tokenizer.ggml.merges has {checks.shown(merge)}, which is not two parts with a space")
        found.append((left, right))
    return found


def _merges_by_score(vocab: Mapping[str, int], tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """All ways to divide a token into two others, the best tokens first."""
    longest = max(tokens, key=len, default="")
    if len(longest) > _MAX_TOKEN:
        raise ValueError(f"tokenizer.ggml.tokens has one of {len(longest)} characters; at most {_MAX_TOKEN} work")
    if (size := sum(map(len, tokens))) > _MAX_CHARACTERS:
        raise ValueError(f"tokenizer.ggml.tokens has {size} characters and no merges; at most {_MAX_CHARACTERS} work")
    score_of = dict(zip(tokens, scores, strict=False))
    found: list[tuple[float, int, int, str, str]] = []
    for token, score in score_of.items():
        ways = [(token[:place], token[place:]) for place in range(1, len(token))]
        known = [(left, right) for left, right in ways if left in vocab and right in vocab]
        known.sort(key=lambda way: (vocab[way[0]], vocab[way[1]]))
        found += [(score, len(left), len(right), left, right) for left, right in known]
        if len(found) > _MAX_MERGES:
            raise ValueError(f"tokenizer.ggml.tokens makes more merges than the {_MAX_MERGES} that work")
    found.sort(key=lambda way: way[:3], reverse=True)
    return [(left, right) for *_, left, right in found]


def _added_tokens(tokens: Sequence[str], types: Sequence[float], *, is_bytes: bool) -> list[Json]:
    """Tokens that are found in a text before it is split: control tokens, which are special, and those of users."""
    letters = set(_byte_spelling().values())
    found: dict[str, Json] = {}
    for token_id, (token, kind) in enumerate(zip(tokens, types, strict=False)):
        is_special = kind == _CONTROL and (not is_bytes or letters.issuperset(token))
        if (is_special or kind == _USER_DEFINED) and token:
            found[token] = {
                "id": token_id,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": is_special,
            }
    return list(found.values())


def _post_processor(metadata: Mapping[str, Scalar | Array], tokens: Sequence[str], *, adds_bos: bool) -> Json:
    """Puts a token before or behind a text; ``adds_bos`` where the file does not say."""
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


def _token_id(metadata: Mapping[str, Scalar | Array], name: str, num_tokens: int) -> int | None:
    """The id of a named token; None: there is none."""
    key = f"tokenizer.ggml.{name}_token_id"
    found = metadata.get(key)
    if found is None or (isinstance(found, int) and found == 2**32 - 1):  # what some converters write for none
        return None
    if not isinstance(found, int) or not 0 <= found < num_tokens:
        raise ValueError(f"{key} is {checks.shown(found)}; there are {num_tokens} tokens")
    return found


def _texts(metadata: Mapping[str, Scalar | Array], key: str) -> list[str]:
    found = metadata.get(key)
    if not isinstance(found, Array):
        raise ValueError(f"it has no array {key}")
    return found.texts()


def _numbers(metadata: Mapping[str, Scalar | Array], key: str, num_items: int) -> tuple[float, ...]:
    """As many numbers as there are tokens; zeros where the file has none."""
    found = metadata.get(key)
    if found is None:
        return (0.0,) * num_items
    if not isinstance(found, Array) or found.num_items != num_items:
        raise ValueError(f"{key} is no array of {num_items} numbers, one for each token")
    return found.numbers()


def _byte_spelling() -> dict[int, str]:
    """The character for each byte in vocabularies of GPT-2: itself where it can be seen, else one from U+0100 on."""
    return dict(_spelled())


def _spelled() -> Iterator[tuple[int, str]]:
    others = 0
    for byte in range(256):
        is_visible = 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255
        yield byte, chr(byte if is_visible else 256 + others)
        others += not is_visible

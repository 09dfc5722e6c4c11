"""Small tokenizers of every kind as tokenizer.json, and a byte-wise reference for text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from string import ascii_letters, digits
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

TEXTS = [
    "Hello, my name is Ada. It is 3 o'clock!",
    " leading and  double spaces",
    "naïve café, Zürich",
    "東京は日本の首都です。",
    "🙂 family: 👨\u200d👩\u200d👧 flag 🇫🇷.",
    "Привет, мир ? 'x' do not",
    "\n\ttabs\r\n",
    "<|tool|>call<|end|> x<|a b|>y",
    "",
]


@dataclass(frozen=True)
class Sample:
    """A tokenizer and its parsed file. With ``has_bytes`` some tokens are parts of characters."""

    name: str
    file: Any
    tokenizer: Tokenizer
    has_bytes: bool

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    @property
    def num_ids(self) -> int:
        return self.tokenizer.get_vocab_size(with_added_tokens=True)


def sample(name: str, *, model: Any, decoder: Any, special: str, has_bytes: bool = False, **sections: Any) -> Sample:
    """Return a tokenizer with three added tokens. ``special`` is a special token of its vocabulary."""
    vocab = model["vocab"]
    first = len(vocab)
    tokens = vocab if isinstance(vocab, dict) else [entry[0] for entry in vocab]
    contents = [("<|end|>", True), ("<|tool|>", False), ("<|a b|>", False)]
    added = [(first + place, content, is_special) for place, (content, is_special) in enumerate(contents)]
    if special in tokens:
        added.append((list(tokens).index(special), special, True))
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    file = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {**flags, "id": id_, "content": content, "special": is_special, "rstrip": content == "<|tool|>"}
            for id_, content, is_special in sorted(added)
        ],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        **sections,
        "decoder": decoder,
        "model": model,
    }
    return Sample(name, file, Tokenizer.from_str(json.dumps(file)), has_bytes)


# ---------------------------------------------------------------- byte-level


def byte_letters() -> list[str]:
    """Return the byte-level alphabet of GPT-2: printable bytes are themselves, other bytes are 256 and up."""
    letters: list[str] = []
    num_others = 0
    for byte in range(256):
        if chr(byte) in "".join(map(chr, [*range(33, 127), *range(161, 173), *range(174, 256)])):
            letters.append(chr(byte))
        else:
            letters.append(chr(256 + num_others))
            num_others += 1
    return letters


LETTERS = byte_letters()


def letters_of(text: str | bytes) -> str:
    return "".join(LETTERS[byte] for byte in (text.encode() if isinstance(text, str) else text))


def bpe(vocab: dict[str, int], merges: Sequence[tuple[str, str]], **options: Any) -> Any:
    vocab = dict(vocab)
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "vocab": vocab,
        "merges": [f"{left} {right}" for left, right in merges],
        **options,
    }


def byte_level() -> Sample:
    pairs = [(" ", "t"), ("h", "e"), (" t", "he"), (b"\xf0", b"\x9f"), (b"\x99", b"\x82"), ("л", b"\xd0"), ("a", " ")]
    merges = [(letters_of(left), letters_of(right)) for left, right in pairs]
    merges.insert(5, (letters_of(b"\xd0"), letters_of(b"\xbb")))
    options = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = bpe({letter: byte for byte, letter in enumerate(LETTERS)}, merges)
    return sample("byte-level", model=model, decoder=options, pre_tokenizer=options, special="", has_bytes=True)


# ---------------------------------------------------------------- SentencePiece kinds

REPLACE = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
LLAMA = [REPLACE, {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]


def byte_fallback(name: str, decoders: list[Any], *, prepends: bool) -> Sample:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁▁", *ascii_letters, *digits]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "H"), ("l", "l")]
    model = bpe({p: i for i, p in enumerate(pieces)}, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    normalizers = [{"type": "Prepend", "prepend": "▁"}, space] if prepends else [space]
    return sample(
        name,
        model=model,
        normalizer={"type": "Sequence", "normalizers": normalizers},
        decoder={"type": "Sequence", "decoders": decoders},
        special="<s>",
        has_bytes=True,
    )


def metaspace(scheme: str) -> Sample:
    options = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": True}
    characters = sorted(set("".join(TEXTS)) - set(" \n"))
    vocab = [["<unk>", 0.0], ["<s>", 0.0], ["▁", -3.0], ["▁the", -2.0], ["▁▁", -2.0]]
    vocab += [[character, -5.0] for character in characters] + [["▁" + letter, -4.0] for letter in "Hmnias"]
    model = {"type": "Unigram", "unk_id": 0, "vocab": vocab, "byte_fallback": False}
    return sample(f"metaspace {scheme}", model=model, pre_tokenizer=options, decoder=options, special="<s>")


# ---------------------------------------------------------------- words


def wordpiece(*, cleanup: bool) -> Sample:
    characters = sorted(set("".join(TEXTS)) - set(" \n\t\r"))
    pieces = ["[UNK]", "[CLS]", *characters, *("##" + letter for letter in characters), "do", "not", "n't", "'s", "is"]
    model = {
        "type": "WordPiece",
        "unk_token": "[UNK]",
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100,
        "vocab": {piece: place for place, piece in enumerate(pieces)},
    }
    decoder = {"type": "WordPiece", "prefix": "##", "cleanup": cleanup}
    pre = {"type": "BertPreTokenizer"}
    return sample(f"wordpiece {cleanup}", model=model, pre_tokenizer=pre, decoder=decoder, special="[CLS]")


def word_level() -> Sample:
    words = ["<unk>", "<s>", *sorted({word for text in TEXTS for word in text.split()})]
    vocab = {word: place for place, word in enumerate(words)}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"}
    return sample("word level", model=model, pre_tokenizer={"type": "WhitespaceSplit"}, decoder=None, special="<s>")


def word_end_bpe() -> Sample:
    letters = sorted(set("".join(TEXTS)) - set(" \n\t\r"))
    vocab = {piece: place for place, piece in enumerate(["<unk>", *letters, *(letter + "</w>" for letter in letters)])}
    model = bpe(vocab, [("h", "e"), ("i", "s</w>")], unk_token="<unk>", end_of_word_suffix="</w>")
    decoder = {"type": "BPEDecoder", "suffix": "</w>"}
    pre = {"type": "WhitespaceSplit"}
    return sample("word-end bpe", model=model, pre_tokenizer=pre, decoder=decoder, special="<unk>")


TABLE_SAMPLES = [
    byte_level(),
    byte_fallback("llama", LLAMA, prepends=True),
    byte_fallback("gemma", LLAMA[:3], prepends=False),
    metaspace("first"),
    metaspace("always"),
    metaspace("never"),
]
ALL_SAMPLES = [*TABLE_SAMPLES, wordpiece(cleanup=True), wordpiece(cleanup=False), word_level(), word_end_bpe()]


# ---------------------------------------------------------------- the byte-wise reference


def _unfinished_characters() -> set[bytes]:
    """Return all prefixes of the UTF-8 bytes of characters."""
    results: set[bytes] = set()
    for code in range(0x80, 0x110000, 0x40):
        if not 0xD800 <= code < 0xE000:
            data = chr(code).encode()
            results.update(data[:end] for end in range(1, len(data)))
    return results


UNFINISHED = _unfinished_characters()


def characters(data: bytes) -> list[tuple[str, int, int]]:
    """Return the characters of ``data`` with their first and last byte. Each maximal invalid part is U+FFFD."""
    results: list[tuple[str, int, int]] = []
    start = 0
    while start < len(data):
        for size in (1, 2, 3, 4):
            try:
                results.append((data[start : start + size].decode(), start, start + size))
                break
            except UnicodeDecodeError:
                continue
        else:
            size = max((size for size in (1, 2, 3) if data[start : start + size] in UNFINISHED), default=1)
            results.append(("\ufffd", start, min(len(data), start + size)))
        start = results[-1][2]
    return results


def text_added(prompt: bytes, output: bytes) -> str:
    """Return the text that ``output`` appends to ``prompt``, without U+FFFD for a character begun by the prompt."""
    whole = characters(prompt + output)
    return "".join(
        character
        for character, start, end in whole
        if end > len(prompt) and (start >= len(prompt) or (prompt + output)[start:end] == character.encode())
    )

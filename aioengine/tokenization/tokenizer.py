"""Converts text and chats to token ids, and ids to text, with the tokenizer of a model folder.

Reads ``tokenizer.json`` with the ``tokenizers`` library, without transformers and torch. The ids are equal to those of
transformers' ``AutoTokenizer`` for the same folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal, ParamSpec, TypeVar, cast, overload

import msgspec
from tokenizers import AddedToken, Encoding
from tokenizers import Tokenizer as FastTokenizer

from aioengine.api import checks
from aioengine.model_files import folder_files
from aioengine.protocol.messages import PairIds
from aioengine.text.token_table import TokenTable, read_token_table
from aioengine.tokenization.chat_template import (
    DEFAULT,
    WITH_TOOLS,
    ChatTemplates,
    ChatText,
    Json,
    Message,
    read_chat_templates,
    template_variables,
)

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def _call(
    function: Callable[_Arguments, _Result], *arguments: _Arguments.args, **options: _Arguments.kwargs
) -> _Result:
    """Call a function of the tokenizers library.

    Raises RuntimeError instead of the library's plain Exception and of its panics. A panic is a BaseException, whose
    class cannot be imported.
    """
    try:
        return function(*arguments, **options)
    except BaseException as error:
        if type(error).__name__ == "PanicException":
            raise RuntimeError(f"the tokenizers library panicked: {error}") from error
        if type(error) is Exception:
            raise RuntimeError(f"the tokenizer failed: {error}") from error
        raise


def _cut_sizes(sizes: list[int], max_tokens: int) -> list[int]:
    """Return the tokens to keep of one or two texts. The shorter one is cut only if it has more than half of them."""
    if len(sizes) == 1:
        return [max_tokens]
    short = min(*sizes, max_tokens // 2)
    return [short, max_tokens - short] if sizes[0] <= sizes[1] else [max_tokens - short, short]


_WITHOUT_TYPES: Final = ("PreTrainedTokenizer", "TokenizersBackend", "DistilBertTokenizer")
"""Classes of transformers (without "Fast") that return no token types unless ``model_input_names`` has them."""


def _has_token_types(config: Json) -> bool:
    """Whether the model gets token types, according to tokenizer_config.json."""
    names = config.get("model_input_names")
    if isinstance(names, list):
        return "token_type_ids" in names
    return str(config.get("tokenizer_class")).removesuffix("Fast") not in _WITHOUT_TYPES


class Tokenizer:
    """The tokenizer of a model folder. Its methods may be called from any thread."""

    def __init__(self, folder: str | Path, *, chat_template: str | None = None, only_decodes: bool = False) -> None:
        """Read the tokenizer's files.

        chat_template: the text of a template that replaces the folder's templates. only_decodes: do not read the parts
        that are only needed to encode. Then ``encode`` returns wrong ids.

        Raises ValueError if the folder has no ``tokenizer.json``, or a file cannot be read.
        """
        self.folder = Path(folder)
        config = folder_files.read_object(self.folder / folder_files.TOKENIZER_CONFIG)
        self._fast = _read_fast_tokenizer(self.folder, only_decodes=only_decodes)
        self._fast.no_truncation()  # some files switch it on, but prompts must not be cut or padded silently
        self._fast.no_padding()
        self._has_token_types = _has_token_types(config)
        older = folder_files.read_object(self.folder / folder_files.SPECIAL_TOKENS)
        self.special_tokens = folder_files.named_tokens(config, older)
        """The text of the special tokens by their names in chat templates: ``bos_token``, ``eos_token``..."""
        _call(_add_tokens, self._fast, self.folder, config, self.special_tokens)
        ids = {name: self._fast.token_to_id(token) for name, token in self.special_tokens.items()}
        self.bos_token_id = ids.get("bos_token")
        """The id of the token at the start of a text; None without such a token."""
        self._eos_token_id = ids.get("eos_token")
        own = read_chat_templates(self.folder)
        self._chats = ChatTemplates(own if chat_template is None else {DEFAULT: chat_template}, self.special_tokens)

    def __repr__(self) -> str:
        return f"<Tokenizer {type(self._fast.model).__name__}, vocab_size={self.vocab_size}, {str(self.folder)!r}>"

    # ------------------------------------------------------------ facts

    @property
    def eos_token_id(self) -> int | None:
        """The id of the token at the end of a text; None without such a token."""
        return next(iter(self.eos_token_ids), None) if self._eos_token_id is None else self._eos_token_id

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """All ids that end a text: from generation_config.json, config.json and the tokenizer."""
        values: list[object] = []
        for name in ("generation_config.json", "config.json"):
            value = folder_files.read_object(self.folder / name).get("eos_token_id")
            values += cast("list[object]", value) if isinstance(value, list) else [value]
        values.append(self._eos_token_id)
        return tuple(dict.fromkeys(value for value in values if isinstance(value, int)))

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest id. (The vocabulary of a model may be larger because of padding.)"""
        highest = max(self._fast.get_added_tokens_decoder(), default=-1)
        return max(highest + 1, self._fast.get_vocab_size(with_added_tokens=True))

    @property
    def template_names(self) -> tuple[str, ...]:
        """The names of the model's chat templates."""
        return tuple(sorted(self._chats.sources))

    @property
    def chat_template(self) -> str:
        """The text of the template for chats with tools, or an empty text."""
        sources = self._chats.sources
        return sources.get(WITH_TOOLS) or sources.get(DEFAULT, "")

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes of a token in a text, which may be a part of a character; None: they depend on other tokens.

        An unknown id has no bytes.
        """
        text = None if self._token_table is None else self._token_table[token_id]
        return text.encode() if isinstance(text, str) else text

    @cached_property
    def _token_table(self) -> TokenTable | None:
        return read_token_table(self.decoding_facts(), skip_special_tokens=False)

    def decoding_facts(self) -> dict[str, Any]:
        """Return the parts of tokenizer.json for decoding: ``decoder``, ``added_tokens``, ``vocab`` of ``model``."""
        decoder = self._fast.decoder
        added = self._fast.get_added_tokens_decoder()
        return {
            "model": {"vocab": self._fast.get_vocab(with_added_tokens=False)},
            "decoder": None if decoder is None else json.loads(decoder.__getstate__()),
            "added_tokens": [
                {"id": token_id, "content": token.content, "special": token.special}
                for token_id, token in sorted(added.items())
            ],
        }

    # ------------------------------------------------------------ encode, decode

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of ``text``. See ``encode_batch``."""
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Return the ids of several texts. Releases the GIL.

        tokenizer.json defines the special tokens that are added, whatever ``add_bos_token`` in tokenizer_config.json
        is (as in transformers 5). But a text that starts with a BOS gets no second one, and nothing is added to
        ``ChatText`` or without ``add_special_tokens``.

        Raises:
            TypeError: a text is not a ``str``.
            ValueError: a text contains a lone surrogate.
            RuntimeError: the tokenizers library failed or panicked; the tokenizer can still be used.
        """
        plain = [checks.text("a text", text) for text in texts]  # the library does not accept subclasses everywhere
        kinds = set(map(type, texts))
        if add_special_tokens and ChatText in kinds:
            if len(kinds) > 1:
                return [self.encode(text) for text in texts]
            add_special_tokens = False
        encodings = _call(self._fast.encode_batch_fast, plain, add_special_tokens=add_special_tokens)
        rows: list[list[int]] = []
        for encoding in encodings:
            ids = encoding.ids
            has_second_bos = add_special_tokens and self.bos_token_id is not None and ids[:2] == [self.bos_token_id] * 2
            rows.append(ids[1:] if has_second_bos else ids)
        return rows

    def encode_pairs(self, pairs: Sequence[tuple[str, str | None]]) -> list[PairIds]:
        """Return the ids of texts, or of pairs of texts, with special tokens. Releases the GIL.

        Raises RuntimeError if the tokenizers library failed or panicked; the tokenizer can still be used.
        """
        inputs = [first if second is None else (first, second) for first, second in pairs]
        encodings = _call(self._fast.encode_batch_fast, inputs, add_special_tokens=True)
        return [self._pair_ids(encoding) for encoding in encodings]

    def _pair_ids(self, encoding: Encoding) -> PairIds:
        pair, types = PairIds(encoding.ids), encoding.type_ids
        if self._has_token_types and types and types[-1]:
            pair.second_text = types.index(1)
        return pair

    def encode_cut(self, first: str, second: str | None, max_tokens: int) -> PairIds:
        """Return at most ``max_tokens`` ids of one text or pair: cut the end, and keep the special tokens.

        In a pair, the longer text is cut first. Raises ValueError if the special tokens alone do not fit.
        """
        one = _call(self._fast.encode, first, add_special_tokens=False)
        two = None if second is None else _call(self._fast.encode, second, add_special_tokens=False)
        num_special = self._fast.num_special_tokens_to_add(second is not None)
        if num_special > max_tokens:
            raise ValueError(f"{max_tokens} tokens are too few: there are {num_special} special tokens")
        parts = [one] if two is None else [one, two]
        sizes = _cut_sizes([len(part.ids) for part in parts], max_tokens - num_special)
        for part, size in zip(parts, sizes, strict=True):
            part.truncate(size)
        return self._pair_ids(_call(self._fast.post_process, one, two, add_special_tokens=True))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ``ids``. Unknown ids have no text. Raises ValueError for ids outside of 32 bits."""
        try:
            return _call(self._fast.decode, ids, skip_special_tokens=skip_special_tokens)
        except OverflowError:
            raise checks.wrong_value("ids", f"integers from 0 to {2**32 - 1}", ids) from None

    # ------------------------------------------------------------ chats

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tokenize: Literal[False] = False,
        tools: Sequence[Mapping[str, object]] | None = None,
        chat_template: str | os.PathLike[str] | None = None,
        continue_final_message: bool = False,
        **variables: object,
    ) -> str: ...
    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tokenize: Literal[True],
        tools: Sequence[Mapping[str, object]] | None = None,
        chat_template: str | os.PathLike[str] | None = None,
        continue_final_message: bool = False,
        **variables: object,
    ) -> list[int]: ...
    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tokenize: bool = False,
        tools: Sequence[Mapping[str, object]] | None = None,
        chat_template: str | os.PathLike[str] | None = None,
        continue_final_message: bool = False,
        **variables: object,
    ) -> str | list[int]:
        """Write a chat as the model expects it: return the text, or with ``tokenize`` its ids.

        ``messages`` are dicts with ``role`` and ``content``. ``tools`` are JSON schemas. ``chat_template`` is the text
        of a template, the name of one of the model's, or a file (``pathlib.Path``). With ``continue_final_message``,
        the text has no end of the last message, so that the model continues it. Other keywords (``enable_thinking``...)
        are variables of the template; ``chat_template_kwargs`` is a dict with more variables.

        Raises:
            ValueError: there is no (such) template, or it refuses these messages.
            TypeError: the messages, tools or variables have a wrong type.
        """
        switches = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        given = switches | template_variables(variables)
        text = self._chats.render(messages, given, tools=tools, chat_template=chat_template)
        return self.encode(text) if tokenize else text


# ---------------------------------------------------------------- files


def _read_fast_tokenizer(folder: Path, *, only_decodes: bool) -> FastTokenizer:
    path = folder / folder_files.TOKENIZER
    content = folder_files.read_tokenizer(path)
    remedy = "pass tokenizer_path= a folder that has one, or skip_tokenizer_init=True and token ids"
    if content is None and folder_files.is_gguf(folder):
        raise ValueError(f"{str(folder)!r} contains no tokenizer; {remedy}")
    if content is None:
        names = ("tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
        others = ", ".join(name for name in names if (folder / name).exists())
        reason = f" (it has {others})" if others else "" if folder.is_dir() else " (there is no such folder)"
        write = "write one with transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        raise ValueError(f"{folder} has no tokenizer.json{reason}; {write}; or {remedy}")
    try:
        if only_decodes:
            content = _without_merges(content)
        return _call(FastTokenizer.from_buffer, content)  # from_file accepts only UTF-8 paths
    except Exception as error:  # the library raises nothing more specific
        shown = folder_files.shown_path(path)
        raise ValueError(f"{shown} cannot be read by this version of tokenizers: {error}") from error


def _without_merges(content: bytes) -> bytes:
    """Remove the merges of BPE from a tokenizer.json. The library takes longer to read them than all the rest."""
    parts = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
    model = msgspec.json.decode(parts["model"], type=dict[str, msgspec.Raw])
    if "merges" in model:
        model["merges"] = msgspec.Raw(b"[]")
    return msgspec.json.encode({**parts, "model": msgspec.Raw(msgspec.json.encode(model))})


def _add_tokens(fast: FastTokenizer, folder: Path, config: Json, named: dict[str, str]) -> None:
    """Add the tokens of tokenizer_config.json that tokenizer.json lacks or describes differently."""
    known = {token.content: token for token in fast.get_added_tokens_decoder().values()}
    new: list[AddedToken] = []
    for content, flags in folder_files.described_tokens(config, folder):
        token = AddedToken(content, **flags)
        token.special = token.special or token.content in named.values()
        if repr(token) != repr(known.get(token.content)):
            new.append(token)
        known[token.content] = token
    special = folder_files.special_tokens(config, named)
    new += [AddedToken(content, special=True) for content in special if content not in known]
    fast.add_tokens(new)  # pyright: ignore[reportUnknownMemberType]

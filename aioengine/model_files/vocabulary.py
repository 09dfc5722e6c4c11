"""The number of ids that a tokenizer knows, and the ids that end a text.

A model's vocabulary is often padded. The padding ids are never sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import msgspec

from aioengine.api import checks
from aioengine.model_files import folder_files
from aioengine.model_files.checkpoint import check_unchanged
from aioengine.model_files.model_folder import ModelFacts
from aioengine.settings.config import Settings


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _TokenizerModel(msgspec.Struct):
    """Unigram models have a list of pairs, all others a map from token to id."""

    vocab: dict[str, int] | list[msgspec.Raw]


class _Tokenizer(msgspec.Struct):
    model: _TokenizerModel
    added_tokens: list[_AddedToken] = []


def num_token_ids(tokenizer_path: str) -> int:
    """Return the largest id of a tokenizer plus one. Other files of the folder may add tokens to tokenizer.json.

    Raises ValueError if a file cannot be read.
    """
    file = Path(tokenizer_path) / folder_files.TOKENIZER
    tokenizer = _read(file)
    vocab = tokenizer.model.vocab
    ids = [len(vocab) - 1] if isinstance(vocab, list) else vocab.values()
    num_ids = 1 + max(chain(ids, (token.id for token in tokenizer.added_tokens)), default=-1)
    added = set(folder_files.added_texts(file.parent)) - {token.content for token in tokenizer.added_tokens}
    if added and isinstance(vocab, list):
        added -= set(_listed_texts(file, vocab))
    elif isinstance(vocab, dict):
        added -= vocab.keys()
    return num_ids + len(added)


def check_same_vocabulary(model: ModelFacts, draft: ModelFacts) -> None:
    """Check that a draft model has the vocabulary of the model. It may have other padding ids.

    Raises ValueError if it has fewer ids, or if the same id is another token.
    """
    shown = f"speculative_draft_model_path={draft.path!r}"
    num_ids = model.vocab_size
    if model.tokenizer_path is not None:
        num_ids = min(num_ids, num_token_ids(model.tokenizer_path))
    if draft.vocab_size < num_ids:
        raise ValueError(
            f"{shown} has a vocabulary of {draft.vocab_size} tokens, and the model has {num_ids}; a draft model needs "
            "the vocabulary of the model"
        )
    if model.tokenizer_path is None or draft.tokenizer_path is None:
        return
    own, other = (_texts(folder) for folder in (model.tokenizer_path, draft.tokenizer_path))
    for token_id in sorted(own.keys() & other.keys()):
        if own[token_id] != other[token_id]:
            raise ValueError(
                f"{shown} has another vocabulary than the model: token {token_id} is {checks.shown(other[token_id])}, "
                f"and for the model {checks.shown(own[token_id])}"
            )


def _texts(tokenizer_path: str) -> dict[int, str]:
    """Return id -> text of the tokens in tokenizer.json."""
    file = Path(tokenizer_path) / folder_files.TOKENIZER
    tokenizer = _read(file)
    vocab = tokenizer.model.vocab
    texts = _listed_texts(file, vocab) if isinstance(vocab, list) else vocab
    ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
    return dict(zip(ids, texts, strict=True)) | {token.id: token.content for token in tokenizer.added_tokens}


def _read(file: Path) -> _Tokenizer:
    """Read tokenizer.json. Raises ValueError if it cannot be read."""
    tokenizer = folder_files.read_json(file, _Tokenizer, folder_files.MAX_TOKENIZER_BYTES)
    if tokenizer is None:
        raise ValueError(f"cannot read {folder_files.shown_path(file)}: there is no such file")
    return tokenizer


def _listed_texts(file: Path, vocab: list[msgspec.Raw]) -> list[str]:
    """Return the texts of a Unigram model in ``file``. Raises ValueError if an entry is no pair of text and score."""
    return [text for text, _ in folder_files.decode_json(file, msgspec.json.encode(vocab), list[tuple[str, float]])]


def sampled_vocab_size(settings: Settings) -> int:
    """Return the number of ids that may be sampled: without padding ids, which the tokenizer does not know.

    Raises ValueError if the tokenizer cannot be read, or was changed after the engine was created.
    """
    path = settings.text.tokenizer_path
    if path is None:
        return settings.model.vocab_size
    num_ids = num_token_ids(path)
    check_unchanged(settings.text.files)
    return min(settings.model.vocab_size, num_ids)


def end_ids(known: Sequence[int], own: int | None, vocab_size: int) -> tuple[int, ...]:
    """Return the ids that end a text: ``known`` from the model's configuration, and ``own`` from the tokenizer.

    Some folders have only the text of the end token. Then only the tokenizer has its id.
    """
    return (*known, own) if own is not None and own not in known and own < vocab_size else tuple(known)

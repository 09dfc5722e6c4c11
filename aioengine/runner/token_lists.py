"""The token lists of sampling parameters, converted to arrays once per request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from torch import Tensor

    from aioengine.protocol.messages import Sampling
    from aioengine.runner.transfer import Upload

    Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class BadSequences:
    """B forbidden sequences of tokens, with E tokens before their last ones.

    Attributes:
        last: [B] the last token of each sequence.
        prefixes: [E] the concatenated tokens before the last ones.
        distances: [E] distance of each of these to the last token of its sequence, at least 1.
        owner: [E] index of its sequence.
    """

    last: Ints
    prefixes: Ints
    distances: Ints
    owner: Ints


@dataclass(frozen=True, slots=True)
class TokenLists:
    """The token lists of one request.

    Attributes:
        bias_ids, bias: [X] tokens and the numbers added to their logits.
        suppressed: [X] tokens forbidden before ``min_new_tokens``.
        allowed: [ceil(W / 32)] int32 on the device, one bit per allowed token; None: all tokens.
        bad: forbidden sequences; None: there are none.
    """

    bias_ids: Ints
    bias: npt.NDArray[np.float32]
    suppressed: Ints
    allowed: Tensor | None
    bad: BadSequences | None


def token_lists(sampling: Sampling, width: int, upload: Upload) -> TokenLists | None:
    """Return the lists of these parameters; None: they have none. width: W, token ids are below it."""
    allowed_ids, bad_ids = sampling.allowed_token_ids, sampling.bad_token_ids
    if not (sampling.bias_token_ids or sampling.suppressed_token_ids or allowed_ids or bad_ids):
        return None
    return TokenLists(
        np.array(sampling.bias_token_ids, dtype=np.int32),
        np.array(sampling.logit_bias, dtype=np.float32),
        np.array(sampling.suppressed_token_ids, dtype=np.int32),
        upload(_bitmask(allowed_ids, width)) if allowed_ids else None,
        _bad_sequences(bad_ids) if bad_ids else None,
    )


def _bitmask(token_ids: tuple[int, ...], width: int) -> Ints:
    """Return a bitmask [ceil(width / 32)] int32. The lowest bit of the first number is token 0."""
    bits = np.zeros(-(-width // 32) * 32, dtype=np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def _bad_sequences(sequences: tuple[tuple[int, ...], ...]) -> BadSequences:
    lengths = [len(ids) - 1 for ids in sequences]
    return BadSequences(
        np.array([ids[-1] for ids in sequences], dtype=np.int32),
        np.array([token_id for ids in sequences for token_id in ids[:-1]], dtype=np.int32),
        np.array([distance for length in lengths for distance in range(length, 0, -1)], dtype=np.int32),
        np.repeat(np.arange(len(sequences), dtype=np.int32), lengths),
    )


def token_indices(rows: Sequence[int], ids: Sequence[Ints], upload: Upload) -> tuple[Tensor, Tensor]:
    """Return the indices of tokens in the logits as rows [X] and token ids [X]. ids: the tokens of each row."""
    row_indices = np.repeat(np.array(rows, dtype=np.int64), [len(row_ids) for row_ids in ids])
    return upload(row_indices), upload(np.concatenate(ids).astype(np.int64))

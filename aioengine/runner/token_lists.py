"""The token lists of sampling parameters, converted to arrays once per request."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aioengine.kernels.arrays import Ints32
from aioengine.protocol.messages import Sampling
from aioengine.runner.transfer import Upload


@dataclass(frozen=True, slots=True)
class BadSequences:
    """B forbidden sequences of tokens, with E tokens before their last ones.

    Attributes:
        last: [B] the last token of each sequence.
        prefixes: [E] the concatenated tokens before the last ones.
        distances: [E] distance of each of these to the last token of its sequence, at least 1.
        owner: [E] index of its sequence.
    """

    last: Ints32
    prefixes: Ints32
    distances: Ints32
    owner: Ints32


@dataclass(frozen=True, slots=True)
class TokenLists:
    """The token lists of one request.

    Attributes:
        bias_ids, bias: [X] tokens and the numbers added to their logits.
        suppressed: [X] tokens forbidden before ``min_new_tokens``.
        allowed: [ceil(W / 32)] int32 on the device, one bit per allowed token; empty if all tokens are allowed.
        bad: forbidden sequences.
    """

    bias_ids: Ints32
    bias: npt.NDArray[np.float32]
    suppressed: Ints32
    allowed: Tensor
    bad: BadSequences


def token_lists(sampling: Sampling, width: int, upload: Upload) -> TokenLists:
    """Return the lists of these parameters. width: W, token ids are below it."""
    allowed_ids, bad_ids = sampling.allowed_token_ids, sampling.bad_token_ids
    if not (sampling.bias_token_ids or sampling.suppressed_token_ids or allowed_ids or bad_ids):
        return NO_LISTS
    return TokenLists(
        np.array(sampling.bias_token_ids, dtype=np.int32),
        np.array(sampling.logit_bias, dtype=np.float32),
        np.array(sampling.suppressed_token_ids, dtype=np.int32),
        upload(_bitmask(allowed_ids, width)) if allowed_ids else NO_LISTS.allowed,
        _bad_sequences(bad_ids),
    )


def _bitmask(token_ids: tuple[int, ...], width: int) -> Ints32:
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


_NO_IDS = np.zeros(0, dtype=np.int32)
NO_LISTS = TokenLists(_NO_IDS, np.zeros(0, dtype=np.float32), _NO_IDS, torch.zeros(0), _bad_sequences(()))

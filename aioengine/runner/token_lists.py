"""The lists of tokens among the sampling parameters, as arrays that are made once for a request, not in every step."""

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
    """B sequences of tokens whose last one cannot be drawn behind the others, E in all.

    last: [B] the last token of each. others: [E] the tokens before it, of one sequence after the other. back: [E] how
    far each of these stands before the last one, from 1 on. owner: [E] its sequence.
    """

    last: Ints
    others: Ints
    back: Ints
    owner: Ints


@dataclass(frozen=True, slots=True)
class TokenLists:
    """Those of one request.

    bias_ids, bias: [X] tokens and what is added to their logits. suppressed: [X] tokens, before ``min_new_tokens``.
    allowed: [ceil(W / 32)] int32 on the device, a bit for each token that can be drawn; None: all. bad: None: none.
    """

    bias_ids: Ints
    bias: npt.NDArray[np.float32]
    suppressed: Ints
    allowed: Tensor | None
    bad: BadSequences | None


def token_lists(sampling: Sampling, width: int, upload: Upload) -> TokenLists | None:
    """The lists of these parameters, whose ids are below ``width`` (W); None where they have none."""
    allowed_ids, bad_ids = sampling.allowed_token_ids, sampling.bad_token_ids
    if not (sampling.bias_token_ids or sampling.suppressed_token_ids or allowed_ids or bad_ids):
        return None
    return TokenLists(
        np.array(sampling.bias_token_ids, dtype=np.int32),
        np.array(sampling.logit_bias, dtype=np.float32),
        np.array(sampling.suppressed_token_ids, dtype=np.int32),
        upload(_words(allowed_ids, width)) if allowed_ids else None,
        _bad_sequences(bad_ids) if bad_ids else None,
    )


def _words(token_ids: tuple[int, ...], width: int) -> Ints:
    """Bits [ceil(width / 32)] int32, the lowest one of the first word for token 0."""
    bits = np.zeros(-(-width // 32) * 32, dtype=np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def _bad_sequences(sequences: tuple[tuple[int, ...], ...]) -> BadSequences:
    others = [ids[:-1] for ids in sequences]
    lengths = [len(ids) for ids in others]
    return BadSequences(
        np.array([ids[-1] for ids in sequences], dtype=np.int32),
        np.array([token_id for ids in others for token_id in ids], dtype=np.int32),
        np.array([back for length in lengths for back in range(length, 0, -1)], dtype=np.int32),
        np.repeat(np.arange(len(sequences), dtype=np.int32), lengths),
    )


def token_places(rows: Sequence[int], ids: Sequence[Ints], upload: Upload) -> tuple[Tensor, Tensor]:
    """Where the tokens ``ids`` of each of ``rows`` of the logits stand in them: rows [X] and tokens [X]."""
    indices = np.repeat(np.array(rows, dtype=np.int64), [len(each) for each in ids])
    return upload(indices), upload(np.concatenate(ids).astype(np.int64))

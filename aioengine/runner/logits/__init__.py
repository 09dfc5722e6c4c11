"""Logits processors.

Processors change fp32 logits in place, and only the rows that use them. Other rows keep the bits of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

from aioengine.kernels.arrays import Ints64
from aioengine.protocol.messages import Sampling
from aioengine.runner.logits.grammar import GrammarMask
from aioengine.runner.logits.token_processors import AllowedTokenIds, BadWords, Bias, MinNewTokens, Penalties
from aioengine.runner.request_row import LogitsRow, SampledRows
from aioengine.runner.transfer import Upload


class LogitsProcessor(Protocol):
    """A sampler has one instance. It may keep scratch memory, but no state of requests."""

    def wants(self, sampling: Sampling) -> bool:
        """Return whether a request with these parameters needs this processor."""
        ...

    def apply(self, logits: Tensor, rows: list[LogitsRow], upload: Upload) -> None:
        """Change ``rows`` of logits [S, W] fp32 in place. ``upload`` copies host data without waiting for the GPU."""
        ...


def in_order(custom: Sequence[LogitsProcessor] = ()) -> tuple[LogitsProcessor, ...]:
    """Return all processors, in the order of their application. Processors that forbid tokens come last, so that no
    later processor raises the logit of a forbidden token.
    """
    return MinNewTokens(), Penalties(), Bias(), *custom, AllowedTokenIds(), BadWords(), GrammarMask()


def apply_processors(
    processors: Sequence[LogitsProcessor],
    logits: Tensor,
    rows: SampledRows,
    chosen: Ints64,
    upload: Upload,
) -> None:
    """Apply the processors that the rows ``chosen`` [X] need to their logits [X, W]."""
    bits = rows.records["processors"][chosen]
    for i, processor in enumerate(processors):
        users = np.flatnonzero(bits >> i & 1)
        if users.size:
            requests = [rows.requests[row] for row in chosen[users].tolist()]
            positions = rows.positions[chosen[users]].tolist()
            processor.apply(logits, [*map(LogitsRow, users.tolist(), requests, positions)], upload)

"""The plan of a step and its result: data that names no device.

A request has ``num_tokens`` positions that are known (prompt and output) and ``num_computed`` positions with KV. A row
means "compute ``count`` positions from ``start`` on". Prefill, chunked prefill, the rest after a prefix hit and decode
are this one case. Where the last token of a row was sampled by a step that is still in flight, the plan cannot name
it: ``token_ids`` then ends one short, and the runner takes the token that it holds for this request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from aioengine.protocol.columns import BadColumnsError, TokenColumns
from aioengine.protocol.messages import Media, RequestKind, Sampling
from aioengine.protocol.packed_logprobs import LogprobRules

if TYPE_CHECKING:
    from collections.abc import Collection


NOTHING = 0
TOKENS = 1
VECTOR = 2
DISTRIBUTION = 4
"""Bits of ``Row.outputs``; plain integers, for they are read once for each row of each step."""


class Row(Struct, array_like=True, gc=False):
    """One request's part of a step.

    uid: the request.
    start: first position to compute; positions before it have KV.
    token_ids: ids at positions ``start`` ... ``start + count - 1``; a decode row carries none (the runner holds the
        token that it sampled last for this request).
    count: positions to compute, at least 1.
    gives: bits. TOKENS: the logits of the last position give a new token, at position ``start + count``; the runner
        may give none, or several from this position on. VECTOR: the hidden states of the request give its pooled
        vector. DISTRIBUTION: the logits of the last position give logprobs and no token. NOTHING: the row writes KV
        only, as a chunk of a prompt.
    new_pages: pages appended to the request's page table since its last row.
    """

    uid: int
    start: int
    count: int
    outputs: int
    token_ids: list[int] = []
    new_pages: list[int] = []


class NewRow(Struct, array_like=True, gc=False):
    """A request that the runner must know from this step on (also again, after a preemption).

    token_ids: all tokens known so far, prompt then output: for penalties, and for counting output tokens.
    pages: its page table so far, with place for all of ``token_ids``; the first of them may be a prefix hit, which its
        first row then leaves out.
    kind: a POOL request gets no row with TOKENS, and its last row has VECTOR; that of a SCORE request has DISTRIBUTION.
    logprobs: those that it still needs, as extras: of each output token with the token, of the prompt with the first
        output token (or with DISTRIBUTION). Rows of the prompt then begin at ``logprobs.start - 1`` at the latest.
    second_text: where the second text of a pair begins; 0: there is none.
    embeds, media: as in ``Submit``.
    is_long: its rotations are those of long texts (``InputSpec.short_length``).
    adapter_slot: the slot of its adapter, from 1; 0: it uses the base model. It keeps this slot until it is closed.
    snapshot: the id of the snapshot with which its states begin; -1: its first row begins at position 0.
    """

    uid: int
    sampling: Sampling
    num_prompt: int
    token_ids: list[int]
    pages: list[int] = []
    kind: RequestKind = RequestKind.GENERATE
    logprobs: LogprobRules | None = None
    second_text: int = 0
    embeds: bytes = b""
    adapter_slot: int = 0
    media: list[Media] = []
    is_long: bool = False
    snapshot: int = -1


class Plan(Struct, array_like=True, gc=False):
    """The work of one step, in this order: forget ``closed``, add ``new_rows``, compute ``rows``, take ``snapshots``.

    snapshots: uids of rows, and the ids of the snapshots to which the states behind these rows are copied.

    ``closed`` may name a uid that the runner does not know (a launch had failed) or whose row is still in flight.
    """

    rows: list[Row]
    new_rows: list[NewRow] = []
    closed: list[int] = []
    snapshots: list[tuple[int, int]] = []

    @property
    def num_tokens(self) -> int:
        return sum(row.count for row in self.rows)


class StepResult(Struct, array_like=True, gc=False):
    """The result of a step.

    tokens: has a row for each row of the plan that gives anything, in the same order. A row with VECTOR has no tokens
        and an extra of the kind ``POOLED_VECTOR``, one with DISTRIBUTION none and an extra of the kind
        ``NEXT_LOGPROBS``. Behind a number of tokens other than one, rows of the request that were launched already do
        not count, whatever they give; later ones carry all their tokens, until one gives tokens.
    failed: maps the uid of a row that could not be computed or sampled to what happened. Its tokens (one that is -1,
        for example) do not count; that request ends alone, and what stands in its pages is of no use to others.
    complete: uids of rows whose grammar allows no further token: the request ends with these tokens.
    """

    tokens: TokenColumns
    failed: dict[int, str] = {}
    complete: list[int] = []

    def check(self, plan: Plan) -> None:
        """Raise BadColumnsError unless its rows are those that ``plan`` asks for."""
        expected = [row.uid for row in plan.rows if row.outputs]
        if self.tokens.uids != expected:
            raise BadColumnsError(f"the runner gave rows of the requests {self.tokens.uids}, not of {expected}")


class UnknownOrderError(ValueError):
    """Raised by ``Runner.control`` for an order that the runner does not implement.

    Attributes:
        known: names of the orders that it implements.
    """

    def __init__(self, name: str, known: Collection[str] = ()) -> None:
        super().__init__(f"the runner does not implement the order {name!r}")
        self.known = known

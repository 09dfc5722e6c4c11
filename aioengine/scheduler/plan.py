"""The plan of a step and its result: plain data, independent of the device.

A row means: compute ``count`` positions from ``start`` on. Prefill, chunked prefill, the rest after a prefix hit, and
decode are the same case. A decode row has no token ids, because a step in flight may still sample its token: the runner
uses the newest token that it holds for this request.

A row can end with *drafts*: tokens that the scheduler has looked up (n-grams), or positions for which the runner may
propose tokens. It accepts the first drafts that equal the tokens it samples, and rejects the others. The next plan does
not wait for this decision: it assumes that all drafts were accepted. So ``start`` is an upper bound if an earlier row
in flight has drafts. The runner computes the row from ``start`` minus the drafts rejected in flight.
``Scheduler.apply`` subtracts them too.
"""

from __future__ import annotations

from msgspec import Struct

from aioengine.protocol.columns import TokenColumns
from aioengine.protocol.messages import Media, RequestKind, Sampling
from aioengine.protocol.packed_logprobs import LogprobRules

NOTHING = 0
TOKENS = 1
VECTOR = 2
DISTRIBUTION = 3
"""Values of ``Row.outputs``. Plain integers for speed: they are read for each row of each step."""


class Row(Struct, array_like=True, gc=False):
    """One request's part of a step.

    uid: the request.
    start: first position to compute; positions before it have KV.
    token_ids: ids at positions from ``start`` on. Empty for a decode row: the runner holds the last sampled token.
    count: number of positions to compute, including drafts; at least 1.
    outputs: TOKENS: sample a token for position ``start + count``, and for each draft. VECTOR: return the pooled
        vector. DISTRIBUTION: return logprobs of the next token, but no token. NOTHING: only write KV, for a chunk of a
        prompt.
    new_pages: pages appended to the page table of the request since its last row.
    num_drafts: number of drafts, at the last positions of the row.
    drafts: the drafts, if they are n-grams; empty: the runner proposes them.
    expected_id: the token before ``drafts``, which a step in flight may still sample. If it samples another token, the
        drafts are left out.
    """

    uid: int
    start: int
    count: int
    outputs: int
    token_ids: list[int] = []
    new_pages: list[int] = []
    num_drafts: int = 0
    drafts: list[int] = []
    expected_id: int = -1


class NewRow(Struct, array_like=True, gc=False):
    """A request that is new to the runner, or new again after a preemption.

    token_ids: all known tokens, prompt then output: for penalties, and to count output tokens.
    pages: its page table. The first pages may be a prefix hit, which its first row skips.
    kind: the last row of a POOL request has VECTOR, the last row of a SCORE request has DISTRIBUTION. Neither kind has
        a row with TOKENS.
    logprobs: the logprobs that it still needs. They are returned as extras: for each output token with the token, for
        the prompt with the first output token (or with DISTRIBUTION). The first row then starts at or before
        ``logprobs.start - 1``.
    second_text: index of the first token of the second text of a pair; 0: there is none.
    embeds, media: as in ``Submit``.
    is_long: it uses long RoPE factors (``InputSpec.short_length``).
    adapter_slot: the slot of its adapter, counted from 1, until the request is closed; 0: the base model.
    snapshot: id of the snapshot from which its state is loaded; -1: its first row starts at position 0.
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


class StepPlan(Struct, array_like=True, gc=False):
    """The work of one step, in this order: forget ``closed``, add ``new_rows``, compute ``rows``, take ``snapshots``.

    closed: uids. The runner may not know a uid (because a launch failed), or its row may still be in flight.
    snapshots: (uid of a row, id of the snapshot to which the state after this row is copied).
    needs_logits: set by rank 0 for the other ranks: it samples from the logits of all ranks.
    """

    rows: list[Row]
    new_rows: list[NewRow] = []
    closed: list[int] = []
    snapshots: list[tuple[int, int]] = []
    needs_logits: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(row.count for row in self.rows)


class StepResult(Struct, array_like=True, gc=False):
    """The result of a step.

    tokens: one entry for each row of the plan with outputs, in the same order. A row with TOKENS has the tokens that
        no earlier result had: accepted drafts, the token sampled after them, then its forced tokens, if any. Rows in
        flight sample the first forced tokens again, so they may have no token. A row with VECTOR has no tokens but an
        extra of kind ``POOLED_VECTOR``, a row with DISTRIBUTION an extra of kind ``NEXT_LOGPROBS``.
    failed: uid -> error, for rows that could not be computed or sampled. Their tokens are dropped, only these requests
        end, and their pages are not shared.
    complete: uids of rows whose grammar allows no further token: the request ends with the tokens of this step.
    num_rejected: uid -> number of rejected drafts, including planned drafts that were not proposed. Rows without
        rejected drafts have no entry.
    num_proposed: uid -> number of proposed drafts. Rows without proposed drafts have no entry.
    empty: uids of failed rows whose grammar and token lists allow no token.
    """

    tokens: TokenColumns
    failed: dict[int, str] = {}
    complete: list[int] = []
    num_rejected: dict[int, int] = {}
    num_proposed: dict[int, int] = {}
    empty: list[int] = []

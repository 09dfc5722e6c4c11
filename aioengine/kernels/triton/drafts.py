"""Accept drafts on a GPU, and move the rows of the next step to their exact positions. ``runner.speculation.proposer``
explains why the host does not know these. A program has one row.

R rows of a step, T tokens, B rows of a graph, C columns, P page ids, X entries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton.language as tl

from aioengine.kernels.triton.launcher import kernel

if TYPE_CHECKING:
    from torch import Tensor


@kernel(do_not_specialize=["num_rows", "stride"], do_not_specialize_on_alignment=["spans", "token_ids", "sources"])
def _accept_kernel(
    spans: tl.tensor, num_rows: tl.tensor, token_ids: tl.tensor, sources: tl.tensor, last_tokens: tl.tensor,
    rejected: tl.tensor, stride: tl.tensor,
) -> None:  # fmt: skip
    """Accept the drafts of one row. stride: the distance of sampled tokens of a row in ``last_tokens``."""
    span = spans + tl.program_id(0)
    row, first, num_drafts = tl.load(span), tl.load(span + num_rows), tl.load(span + 2 * num_rows)
    num_planned, sampled = tl.load(span + 3 * num_rows), last_tokens + tl.load(span + 4 * num_rows)
    token = tl.load(token_ids + first)
    tl.store(sampled, tl.maximum(token, 0))
    count = tl.full((), 0, tl.int64)
    is_accepted = num_drafts > 0
    for number in tl.range(first + 1, first + 1 + num_drafts):
        draft, after = tl.load(last_tokens + tl.load(sources + number)), tl.load(token_ids + number)
        is_accepted = is_accepted & (draft == token) & (after >= 0)  # as in ``num_accepted``
        count += is_accepted.to(count.dtype)
        token = tl.where(is_accepted, after, token)
        tl.store(sampled - (number - first) * stride, tl.maximum(after, 0))
    tl.store(last_tokens + row, tl.maximum(token, 0))
    tl.store(rejected + row, (num_planned - count).to(tl.int32))


def accept(spans: Tensor, token_ids: Tensor, sources: Tensor, last_tokens: Tensor, rejected: Tensor) -> None:
    """Accept the first drafts of each row that equal the tokens sampled at their positions.

    Args:
        spans: [5, R] int64. For each row: its row index, the index in the step of its last token before the drafts, the
            number of drafts, the number of planned drafts, and the index in ``last_tokens`` for the first sampled
            token. The other sampled tokens are stored before it, each ``max_rows`` entries before the previous one.
        token_ids: [T] the tokens sampled after each token of the step.
        sources: [>= T] int32, indices in ``last_tokens`` of the tokens of the step.
        last_tokens: [X], see ``RowTable``. Gets the sampled tokens of each row, and at its row index the last of them
            that counts.
        rejected: [max_rows + 1] int32. Gets the number of rejected drafts of each row, at its row index.
    """
    num_rows = spans.shape[1]
    arguments = spans, num_rows, token_ids, sources, last_tokens, rejected, len(rejected) - 1
    _accept_kernel((num_rows, 1, 1), None, arguments, {"num_warps": 1})


@kernel(do_not_specialize=["stride"], do_not_specialize_on_alignment=["starts", "page_ids"])
def _move_kernel(
    columns: tl.tensor, stride: tl.tensor, starts: tl.tensor, page_ids: tl.tensor, rejected: tl.tensor,
    INDEX: tl.constexpr, SAMPLED: tl.constexpr, PAGE_SIZE: tl.constexpr, LAG: tl.constexpr,
) -> None:  # fmt: skip
    """Move one row. Columns 1 to 4: positions, slots, last lengths, targets. INDEX: the last column, with the index in
    ``rejected``; the column before it has the page table.
    """
    row = columns + tl.program_id(0)
    position, slot, last_length, target = row + stride, row + 2 * stride, row + 3 * stride, row + 4 * stride
    table, num_rejected = tl.load(row + (INDEX - 1) * stride), tl.load(rejected + tl.load(row + INDEX * stride))
    sampled = tl.load(row + SAMPLED * stride) - num_rejected
    if table < 0:  # at an exact position; it is sampled only if its token is the last one that counts
        tl.store(row + SAMPLED * stride, sampled)
        if tl.load(position) + 1 + LAG != sampled:
            tl.store(target, -1)
    elif num_rejected > 0:
        start = starts + table
        first, length = tl.load(start), tl.load(last_length) - num_rejected
        last = (tl.load(start + 1) - first - 1) * PAGE_SIZE + length - 1  # the position within the page table
        tl.store(position, tl.load(position) - num_rejected)
        page = tl.load(page_ids + first + last // PAGE_SIZE)
        tl.store(slot, page * PAGE_SIZE + last % PAGE_SIZE)
        tl.store(last_length, length)
        tl.store(row + SAMPLED * stride, sampled)


def move_rows(
    columns: Tensor, pages: tuple[Tensor, Tensor], rejected: Tensor, *, sampled: int, page_size: int, lag: int
) -> None:
    """Subtract the rejected drafts from the positions, slots and last lengths of the rows of a decode graph.

    A draft model also computes all tokens of the previous step, accepted or not. The positions of these rows are exact,
    and only the row of the last token that counts is sampled.

    Args:
        columns: [C, B] int32, see ``decode_inputs``. The last two have the number of the page table of each row (-1:
            its position is exact), and its index in ``rejected``.
        pages: starts [B + 1] of the page tables among the page ids, and page ids [P]. A last length may become
            negative: the row then ends on an earlier page.
        sampled: index of the column with the positions of sampled tokens.
        lag: how much smaller the position of a token is than in the model: 1 for a draft head, else 0.
    """
    num_columns, num_rows = columns.shape
    sizes = num_columns - 1, sampled, page_size, lag
    _move_kernel((num_rows, 1, 1), sizes, (columns, num_rows, *pages, rejected, *sizes), {"num_warps": 1})

"""Accept drafts on a GPU, and move the rows of the next step to their exact positions.

A step may begin before the host knows which drafts of the previous step were accepted. It assumes that all of them
were, so the positions of its rows are upper bounds. Its CUDA graphs subtract the number of rejected drafts.

R rows of a step, T tokens, B rows of a graph, P page ids, X entries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from aioengine.kernels.triton.launcher import KernelLauncher

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit(do_not_specialize=["num_rows", "stride"], do_not_specialize_on_alignment=["spans", "token_ids", "sources"])
def _accept_kernel(
    spans: tl.tensor, num_rows: tl.tensor, token_ids: tl.tensor, sources: tl.tensor, last_tokens: tl.tensor,
    rejected: tl.tensor, stride: tl.tensor,
) -> None:  # fmt: skip
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


_accept = KernelLauncher(_accept_kernel)


def accept(spans: Tensor, token_ids: Tensor, sources: Tensor, last_tokens: Tensor, rejected: Tensor) -> None:
    """Accept the first drafts of each row that equal the tokens sampled at their positions.

    Args:
        spans: [5, R] int64: row index, index of the first token of the row, number of drafts after it, number of
            planned drafts, index in ``last_tokens`` for the first sampled token. Each further one is stored a number
            of rows of the table before the one before it.
        token_ids: [T] sampled after each token. sources: [>= T] int32, indices of the tokens in ``last_tokens``.
        last_tokens: [X]; the sampled tokens of each row are stored, and the last one after accepted drafts.
        rejected: the number of rejected drafts of each row is stored at its row index.
    """
    num_rows = spans.shape[1]
    arguments = spans, num_rows, token_ids, sources, last_tokens, rejected, len(rejected) - 1
    _accept((num_rows, 1, 1), None, arguments, {"num_warps": 1})


@triton.jit(do_not_specialize=["stride"], do_not_specialize_on_alignment=["starts", "page_ids"])
def _move_kernel(
    columns: tl.tensor, stride: tl.tensor, starts: tl.tensor, page_ids: tl.tensor, rejected: tl.tensor,
    INDEX: tl.constexpr, SAMPLED: tl.constexpr, PAGE_SIZE: tl.constexpr, LAG: tl.constexpr,
) -> None:  # fmt: skip
    column = columns + tl.program_id(0)
    row = tl.load(column + INDEX * stride)
    is_exact = row < 0
    later = tl.load(rejected + tl.where(is_exact, -1 - row, row))
    sampled = tl.load(column + SAMPLED * stride) - later
    if is_exact:
        tl.store(column + SAMPLED * stride, sampled)
        if tl.load(column + stride) + 1 + LAG != sampled:
            tl.store(column + 4 * stride, -1)
    elif later > 0:
        start = starts + tl.load(column + (INDEX - 1) * stride)
        first, last_length = tl.load(start), tl.load(column + 3 * stride) - later
        index = (tl.load(start + 1) - first - 1) * PAGE_SIZE + last_length - 1
        tl.store(column + stride, tl.load(column + stride) - later)
        page = tl.load(page_ids + first + index // PAGE_SIZE)
        tl.store(column + 2 * stride, page * PAGE_SIZE + index % PAGE_SIZE)
        tl.store(column + 3 * stride, last_length)
        tl.store(column + SAMPLED * stride, sampled)


_move = KernelLauncher(_move_kernel)


def move_rows(
    columns: Tensor, pages: tuple[Tensor, Tensor], rejected: Tensor, *, sampled: int, page_size: int, lag: int
) -> None:
    """Subtract the rejected drafts from the positions, slots and last lengths of the rows of a decode graph.

    Some rows are exact. They are the tokens of the step before, and only the one after its accepted drafts is sampled.

    Args:
        columns: [C, B] int32, see ``decode_graphs``. The last two have the page table of each row, and its index in
            ``rejected``: i, or -1 - i for an exact row.
        pages: starts [B + 1] of the page tables among the page ids, and page ids [P]. A last length may become
            negative: the row then ends on an earlier page.
        sampled: index of the column with the positions of sampled tokens.
        lag: number of known tokens that have no position yet.
    """
    num_columns, num_rows = columns.shape
    sizes = num_columns - 1, sampled, page_size, lag
    _move((num_rows, 1, 1), sizes, (columns, num_rows, *pages, rejected, *sizes), {"num_warps": 1})

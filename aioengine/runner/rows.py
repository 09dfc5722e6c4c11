"""What the runner holds of each request: its last token, its page table, how it is sampled.

A request has a slot of the tables from the step that opens it to the step that closes it. How it is sampled stands in
one numpy record a slot, so that a step gathers its columns at once; the last token stays on the device, where the next
step reads it without the host having seen it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from aioengine.protocol.messages import SEED_MASK, RequestKind
from aioengine.runner.kv_pool import FIRST_PAGE, PADDING_PAGE
from aioengine.runner.sampling.truncation import TOP_K_OFF
from aioengine.runner.transfer import upload_to

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from aioengine.protocol.messages import Sampling
    from aioengine.runner.logits import LogitsProcessor
    from aioengine.scheduler.plan import OpenedRow

    Ints = npt.NDArray[np.int64]

SAMPLING_RECORD = np.dtype(
    [
        ("is_plain", np.bool_),  # greedy, and no processor
        ("is_greedy", np.bool_),
        ("is_truncated", np.bool_),  # by top-k, top-p or min-p
        ("processors", np.int64),  # bit i: processor i of the tuple
        ("temperature", np.float32),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("seed", np.uint64),
    ]
)


@dataclass(slots=True)
class RequestRow:
    """An open request.

    history: on the CPU its tokens, [more than there are] int64, where penalties read them. token_ids: on a GPU, where
    ``runner.sampling.token_counts`` counts them, those that it was opened with; else empty.
    """

    uid: int
    slot: int
    sampling: Sampling
    num_prompt: int
    history: Tensor | None
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The S rows of a step that give a token. ``positions``: the place of the new token in its request."""

    requests: list[RequestRow]
    slots: Ints
    positions: Ints
    records: npt.NDArray[np.void]  # of SAMPLING_RECORD


class RowTable:
    """The open requests and their tables. ``num_pages`` at construction: pages of the pool that plans may name.

    page_table: [slots, max_row_pages] int32 on the host, pages of the pool: the first ``num_pages`` [slots] of a row
    are its own, the others are the padding page.
    last_tokens: [slots + 1] int64 on the device, the last one nobody's. sampling: [slots] of SAMPLING_RECORD.
    num_slots: as many requests can be open. The tables stay where they are: CUDA graphs know their places.
    num_opened: requests so far; as long as it stays the same, a slot is the same request's.
    """

    def __init__(
        self,
        *,
        max_row_pages: int,
        num_pages: int,
        num_embeddings: int,
        device: torch.device,
        processors: tuple[LogitsProcessor, ...],
        num_slots: int,
    ) -> None:
        self.requests: dict[int, RequestRow] = {}
        self.page_table = np.zeros((num_slots, max_row_pages), dtype=np.int32)  # takes memory as far as it is used
        self.num_pages = np.zeros(num_slots, dtype=np.int64)
        self.last_tokens = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self.sampling = np.zeros(num_slots, dtype=SAMPLING_RECORD)
        self.upload = upload_to(device)
        self.num_opened = 0
        self._pool_pages = num_pages
        self._num_embeddings = num_embeddings
        self._processors = processors
        self._free_slots = list(range(num_slots - 1, -1, -1))

    def open(self, opened: OpenedRow) -> None:
        """Learn a request (again).

        Raises:
            ValueError: a parameter or a token that would harm the rows beside it, or too many requests are open.
        """
        self._check(opened)
        if not self._free_slots:
            message = f"{len(self.requests)} requests are open, and no more can be"
            raise ValueError(message)
        slot = self._free_slots.pop()
        history, token_ids = None, list[int]()
        if opened.sampling.has_penalties:
            if self.last_tokens.is_cuda:
                token_ids = opened.token_ids
            else:
                history = torch.tensor([*opened.token_ids, *[0] * 64], dtype=torch.int64)
        request = RequestRow(opened.uid, slot, opened.sampling, opened.num_prompt, history, token_ids)
        self.requests[opened.uid] = request
        self.num_opened += 1
        self.sampling[slot] = self._record(opened.sampling)
        self.num_pages[slot] = 0
        self.page_table[slot] = PADDING_PAGE
        self.add_pages(request, opened.pages)

    def close(self, uid: int) -> None:
        """Forget a request; one that is not known is ignored."""
        request = self.requests.pop(uid, None)
        if request is not None:
            self._free_slots.append(request.slot)

    def pages(self, uid: int) -> list[int]:
        """Pages of the pool that a request has, in order; empty for one that is not known."""
        request = self.requests.get(uid)
        return [] if request is None else self.page_table[request.slot, : self.num_pages[request.slot]].tolist()

    def add_pages(self, request: RequestRow, pages: list[int]) -> None:
        """Append to its page table. ``pages`` count from 0, as in plans: they leave the padding page out.

        Raises:
            ValueError: more pages than the longest request can have, or a page that is not in the pool.
        """
        start = int(self.num_pages[request.slot])
        end = start + len(pages)
        if end > self.page_table.shape[1]:
            message = f"{end} pages, but the longest request has {self.page_table.shape[1]}"
            raise ValueError(message)
        if pages and not (min(pages) >= 0 and max(pages) < self._pool_pages):
            message = f"pages {pages} are not all in the pool of {self._pool_pages}"
            raise ValueError(message)
        self.page_table[request.slot, start:end] = [page + FIRST_PAGE for page in pages]
        self.num_pages[request.slot] = end

    def sampled(self, requests: list[RequestRow], slots: Ints, positions: Ints) -> SampledRows:
        """These requests as rows that sample."""
        return SampledRows(requests, slots, positions, self.sampling[slots])

    def write_tokens(self, rows: SampledRows, token_ids: Tensor) -> None:
        """Remember the sampled tokens [S] of these rows."""
        usable = token_ids.clamp(min=0)  # a row that failed has -1, which no embedding has
        self.last_tokens.index_copy_(0, self.upload(rows.slots), usable)
        if not rows.records["processors"].any():
            return
        for i, request in enumerate(rows.requests):
            if request.history is not None:
                position = int(rows.positions[i])
                history = _with_room(request.history, position + 1)
                history[position] = usable[i]
                request.history = history

    def _check(self, opened: OpenedRow) -> None:
        sampling = opened.sampling
        if opened.kind is not RequestKind.GENERATE:
            message = f"the runner implements requests of kind GENERATE, and this one is {opened.kind.name}"
            raise ValueError(message)
        if len(sampling.bias_token_ids) != len(sampling.logit_bias):
            message = f"{len(sampling.bias_token_ids)} bias_token_ids, but {len(sampling.logit_bias)} values"
            raise ValueError(message)
        ids = (*sampling.bias_token_ids, *sampling.suppressed_token_ids)
        if sampling.has_penalties:
            ids = (*ids, *opened.token_ids)
        if ids and not (min(ids) >= 0 and max(ids) < self._num_embeddings):
            wrong = next(i for i in ids if not 0 <= i < self._num_embeddings)
            message = f"token id {wrong} is outside the vocabulary of {self._num_embeddings}"
            raise ValueError(message)

    def _record(self, sampling: Sampling) -> tuple[bool, bool, bool, int, float, int, float, float, int]:
        has_top_k = 0 < sampling.top_k < self._num_embeddings
        is_greedy = sampling.is_greedy
        processors = sum(1 << i for i, processor in enumerate(self._processors) if processor.wants(sampling))
        return (
            is_greedy and not processors,
            is_greedy,
            has_top_k or sampling.top_p < 1.0 or sampling.min_p > 0.0,
            processors,
            sampling.temperature,
            sampling.top_k if has_top_k else TOP_K_OFF,
            sampling.top_p,
            sampling.min_p,
            sampling.seed & SEED_MASK,
        )


def _with_room(history: Tensor, size: int) -> Tensor:
    if size <= len(history):
        return history
    return torch.cat([history, history.new_zeros(max(len(history), size - len(history)))])

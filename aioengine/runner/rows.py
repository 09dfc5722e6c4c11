"""The runner's state of open requests: last tokens, page tables, sampling parameters.

A request has a row of the tables, at its row index, from the step that opens it to the step that closes it. Sampling
parameters are one numpy record per row, so that a step gathers columns at once. The last token stays on the device; the
next step reads it there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from aioengine.protocol.columns import NO_TOKEN
from aioengine.protocol.messages import ALL_STATES, SEED_MASK, RequestKind
from aioengine.runner.logits import Forced, LogitsRow
from aioengine.runner.logits.grammar import GrammarMask
from aioengine.runner.lora.row_adapters import RowAdapters
from aioengine.runner.token_lists import token_lists
from aioengine.runner.transfer import upload_to

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from torch import Tensor

    from aioengine.protocol.messages import Sampling
    from aioengine.protocol.packed_logprobs import LogprobRules
    from aioengine.runner.images import Images
    from aioengine.runner.logits import LogitsProcessor, OpenConstraint, RowConstraint
    from aioengine.runner.lora.pool import AdapterPool
    from aioengine.runner.page_tables import PageTables
    from aioengine.runner.token_lists import TokenLists
    from aioengine.scheduler.plan import NewRow, Row

    Ints = npt.NDArray[np.int64]

RECENT_TOKENS: Final = 512
"""Recent tokens kept for a request with bad words. Also the maximum length of a bad word in tokens."""

FEW_VALUES = 64
"""Requests with up to this number of logprobs per position are computed together, with the largest number among them.
"""

TOP_K_OFF = 1 << 30
"""The ``top_k`` in ``SAMPLING_RECORD`` that keeps all tokens."""

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
class RowLogprobs:
    """The logprobs of an open request.

    Attributes:
        uid, num_prompt: as in ``RequestRow``.
        rules: the requested logprobs.
        size_class: requests of one class are computed together. 0 for up to ``FEW_VALUES`` logprobs per position, else
            the bit length of their number.
        returns_next: a SCORE request: it gets logprobs of the next token after the prompt, but no token.
        prompt: token ids [X] of the prompt if its positions get logprobs, else empty.
        parts: packed logprobs of the prompt computed so far.
    """

    uid: int
    num_prompt: int
    rules: LogprobRules
    size_class: int
    returns_next: bool
    prompt: Ints
    parts: list[bytes]


@dataclass(slots=True)
class RequestRow:
    """An open request.

    Attributes:
        history: [at least its tokens] int64, for penalties on a CPU.
        token_ids: the tokens with which it was opened, for penalties on a GPU (``sampling.token_counts``); else empty.
        prompt_states: hidden states of the prompt computed so far; None: not needed (any more).
        second_text: index of the first token of the second text of a pair; 0: there is none.
        embeds: [num_prompt, D] of a prompt given as embeddings, until it is computed.
        first_id: the first token with an id, after a prompt given as embeddings.
        constraint: the grammar state. may_force: forced tokens may be appended without sampling.
        forced: the last forced tokens. forced_end: number of tokens after them.
        is_pooled: the request is of kind POOL. is_long: as in ``NewRow``.
        lists, recent: see ``logits.LogitsRow``.
    """

    uid: int
    row_index: int
    sampling: Sampling
    num_prompt: int
    history: Tensor | None
    token_ids: list[int]
    logprobs: RowLogprobs | None = None
    prompt_states: list[bytes] | None = None
    second_text: int = 0
    embeds: npt.NDArray[np.float32] | None = None
    first_id: int = 0
    constraint: OpenConstraint | None = None
    may_force: bool = False
    forced: Sequence[int] = ()
    forced_end: int = 0
    is_pooled: bool = False
    is_long: bool = False
    lists: TokenLists | None = None
    recent: Tensor | None = None

    def constraint_at(self, position: int) -> RowConstraint | None:
        """Return the tokens that the grammar allows at ``position``. After forced tokens, a step in flight samples a
        token that is already known.
        """
        if self.constraint is None or position >= self.forced_end:
            return self.constraint
        return Forced(self.forced[position - self.forced_end], self.constraint.source)


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The S rows of a step that sample a token. positions: position of the new token in its request."""

    requests: list[RequestRow]
    row_indices: Ints
    positions: Ints
    records: npt.NDArray[np.void]  # of SAMPLING_RECORD

    def constraints(self) -> list[RowConstraint | None]:
        """Return the constraint of the new token of each row."""
        return [
            request.constraint_at(position)
            for request, position in zip(self.requests, self.positions.tolist(), strict=True)
        ]

    def part(self, chosen: Ints) -> SampledRows:
        """Return the rows ``chosen`` [X]."""
        requests = [self.requests[i] for i in chosen.tolist()]
        return SampledRows(requests, self.row_indices[chosen], self.positions[chosen], self.records[chosen])


class RowTable:
    """The open requests and their tables, in memory with fixed addresses, because CUDA graphs read it.

    Args:
        page_tables: for ``max_rows`` requests.
        num_embeddings: token ids are below this.
        max_rows: maximum number of open requests.
        adapters: the adapter slots; None: all requests use the base model.

    Attributes:
        requests: uid -> open request.
        page_tables: their pages.
        last_tokens: [2 * max_rows] int64 on the device, by row index. The second half is memory for the known tokens of
            expanded rows.
        sampling: [max_rows] of SAMPLING_RECORD.
        num_opened: number of requests opened so far. While it is unchanged, rows belong to the same requests.
        num_pooled: number of open requests of kind POOL.
        num_with_grammar, num_with_logprobs, num_with_states: number of open requests with a grammar, with logprobs,
            with hidden states.
        num_with_embeds: number of open requests whose prompt embeddings are not all computed.
        adapters: the adapter slot of each row.
        images: the images of open requests; None: the model reads no images.
        mask_bit: the bit of the grammar processor in ``SAMPLING_RECORD``.
    """

    def __init__(
        self,
        *,
        page_tables: PageTables,
        num_embeddings: int,
        device: torch.device,
        processors: tuple[LogitsProcessor, ...],
        max_rows: int,
        images: Images | None = None,
        adapters: AdapterPool | None = None,
    ) -> None:
        self.requests: dict[int, RequestRow] = {}
        self.page_tables = page_tables
        self.last_tokens = torch.zeros(2 * max_rows, dtype=torch.int64, device=device)
        self.sampling = np.zeros(max_rows, dtype=SAMPLING_RECORD)
        self.upload = upload_to(device)
        self.num_opened = 0
        self.num_pooled = 0
        self.num_with_grammar = 0
        self.num_with_logprobs = 0
        self.num_with_states = 0
        self.num_with_embeds = 0
        self.images = images
        self.adapters = RowAdapters(max_rows, adapters)
        self._num_embeddings = num_embeddings
        self._processors = processors
        self.mask_bit = sum(1 << i for i, processor in enumerate(processors) if isinstance(processor, GrammarMask))
        self._recent: Tensor | None = None
        self._free_indices = list(range(max_rows - 1, -1, -1))

    def open(self, opened: NewRow) -> None:
        """Open a request.

        Raises:
            ValueError: a bad word is too long, or an image does not match the prompt.
        """
        longest = max(map(len, opened.sampling.bad_token_ids), default=0)
        if longest > RECENT_TOKENS:
            raise ValueError(f"bad_words: a word has at most {RECENT_TOKENS} tokens, got one of {longest}")
        sampling, has_penalties = opened.sampling, opened.sampling.has_penalties
        history, counted_ids = None, list[int]()  # for penalties on a CPU, and on a GPU
        first_id = opened.num_prompt if opened.embeds else 0
        all_ids = list[int]()
        if sampling.bad_token_ids or has_penalties:
            all_ids = [*[NO_TOKEN] * first_id, *opened.token_ids[first_id:]]
        if has_penalties and self.last_tokens.is_cuda:
            counted_ids = opened.token_ids
        elif has_penalties:
            history = self.upload(np.array([*all_ids, *[0] * 64], dtype=np.int64))
        row_index = self._free_indices.pop()
        request = RequestRow(
            opened.uid,
            row_index,
            sampling,
            opened.num_prompt,
            history,
            counted_ids,
            second_text=opened.second_text,
            first_id=first_id,
            is_pooled=opened.kind is RequestKind.POOL,
            is_long=opened.is_long,
        )
        self.requests[opened.uid] = request  # from here on, ``close`` cleans up after an error
        self.num_opened += 1
        self.num_pooled += request.is_pooled
        self.num_with_grammar += sampling.grammar is not None
        self.num_with_states += bool(sampling.hidden_states)
        self.adapters.open(row_index, opened.adapter_slot)
        request.lists = token_lists(sampling, self._num_embeddings, self.upload)
        if sampling.bad_token_ids:
            request.recent = self._open_recent(row_index, all_ids)
        if opened.embeds:
            request.embeds = np.frombuffer(opened.embeds, np.float32).reshape(opened.num_prompt, -1)
            self.num_with_embeds += 1
        if opened.media and self.images is not None:
            self.images.open(opened, row_index)
        if opened.logprobs is not None:
            request.logprobs = _row_logprobs(opened, opened.logprobs)
            self.num_with_logprobs += 1
        if sampling.hidden_states == ALL_STATES and len(opened.token_ids) == opened.num_prompt:
            request.prompt_states = []
        if opened.kind is RequestKind.GENERATE:
            self.sampling[row_index] = self._record(sampling)
        self.page_tables.open(row_index)
        self.page_tables.add(row_index, opened.pages)

    def close(self, uid: int) -> None:
        """Close a request. An unknown uid is ignored."""
        request = self.requests.pop(uid, None)
        if request is not None:
            self._free_indices.append(request.row_index)
            self.num_pooled -= request.is_pooled
            self.num_with_grammar -= request.sampling.grammar is not None
            self.num_with_logprobs -= request.logprobs is not None
            self.num_with_states -= bool(request.sampling.hidden_states)
            self.num_with_embeds -= request.embeds is not None
            if self.images is not None:
                self.images.close(uid, request.row_index)
            self.adapters.close(request.row_index)

    def drop_embeds(self, request: RequestRow) -> None:
        """Drop the embeddings of a request whose prompt is computed."""
        if request.embeds is not None:
            request.embeds = None
            self.num_with_embeds -= 1

    def encode_images(self, rows: list[Row]) -> dict[int, str]:
        """Compute the features of all images that these rows need. Return uid -> error of requests that fail."""
        return {} if self.images is None else self.images.encode(rows)

    def pages(self, uid: int) -> list[int]:
        """Return the pages of a request, in order; empty for an unknown uid."""
        request = self.requests.get(uid)
        return [] if request is None else self.page_tables.pages(request.row_index)

    @property
    def page_table(self) -> npt.NDArray[np.int32]:
        """The page table [max_rows, max_row_pages] of the first layer group, on the host."""
        return self.page_tables.tables[0]

    def sampled(self, requests: list[RequestRow], row_indices: Ints, positions: Ints) -> SampledRows:
        """Return these requests as S rows that sample, with row_indices [S] and positions [S]."""
        return SampledRows(requests, row_indices, positions, self.sampling[row_indices])

    def write_tokens(self, rows: SampledRows, token_ids: Tensor) -> None:
        """Store the sampled tokens [S] of these rows."""
        valid = token_ids.clamp(min=0)  # a failed row has -1, which has no embedding
        self.last_tokens.index_copy_(0, self.upload(rows.row_indices), valid)
        if not rows.records["processors"].any():
            return
        for i, request in enumerate(rows.requests):
            if (history := request.history) is not None:
                position = int(rows.positions[i])
                if position >= len(history):
                    history = request.history = torch.cat([history, torch.zeros_like(history)])
                history[position] = valid[i]
        if self._recent is not None:
            users = np.array([i for i, request in enumerate(rows.requests) if request.recent is not None], np.int64)
            columns = self.upload(rows.positions[users] % RECENT_TOKENS)
            self._recent[self.upload(rows.row_indices[users]), columns] = valid[self.upload(users)].int()

    def _open_recent(self, row_index: int, token_ids: list[int]) -> Tensor:
        """Return ``RequestRow.recent`` [R] of a request with these tokens."""
        if self._recent is None:
            shape = len(self.sampling), RECENT_TOKENS
            self._recent = torch.empty(shape, dtype=torch.int32, device=self.last_tokens.device)
        start = max(0, len(token_ids) - RECENT_TOKENS)
        recent = np.full(RECENT_TOKENS, NO_TOKEN, dtype=np.int32)
        recent[np.arange(start, len(token_ids)) % RECENT_TOKENS] = token_ids[start:]
        return self._recent[row_index].copy_(self.upload(recent))

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


def _row_logprobs(opened: NewRow, rules: LogprobRules) -> RowLogprobs:
    prompt = np.array(opened.token_ids[: opened.num_prompt] if rules.start >= 0 else (), dtype=np.int64)
    parts: list[bytes] = []
    if rules.start == 0:  # position 0 has a token id but no logprobs
        first = np.zeros(rules.position_bytes // 4, dtype=np.int32)
        first[rules.num_values] = prompt[0]
        parts.append(first.tobytes())
    size_class = rules.num_values.bit_length() if rules.num_values > FEW_VALUES else 0
    returns_next = opened.kind is RequestKind.SCORE
    return RowLogprobs(opened.uid, opened.num_prompt, rules, size_class, returns_next, prompt, parts)


def logits_row(index: int, request: RequestRow, position: int) -> LogitsRow:
    """Return row ``index`` of the logits, from which the token at ``position`` of the request is sampled."""
    return LogitsRow(
        index,
        request.sampling,
        request.num_prompt,
        position,
        request.history,
        uid=request.uid,
        first_id=request.first_id,
        constraint=request.constraint_at(position),
        lists=request.lists,
        recent=request.recent,
    )

"""What the runner holds of each request: its last token, its page table, its sampling parameters.

A request has a row of the tables, at its row index, from the step that opens it to the step that closes it. Sampling
parameters are one numpy record a row, so that a step gathers their columns at once. The last token stays on the device,
where the next step reads it without a copy to the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from aioengine.protocol.columns import NO_TOKEN
from aioengine.protocol.messages import ALL_STATES, SEED_MASK, RequestKind
from aioengine.runner.logits import Forced, LogitsRow
from aioengine.runner.logits.grammar import GrammarMask
from aioengine.runner.lora.row_adapters import RowAdapters
from aioengine.runner.sampling.truncation import TOP_K_OFF
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
"""Of a request with bad words: one more than those that a bad word can have in front of its last token."""

FEW_VALUES = 64
"""Requests for up to this number of logprobs at a position are computed together, all for the largest number among
them.
"""

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

    rules: those that it wants. size_class: requests of one class are computed together: 0 for up to ``FEW_VALUES`` of a
    position, else the bits of their number. gives_next: what stands behind the prompt gets them and is no token.
    prompt: ids [X] of the prompt if its positions get them, else none. parts: of the prompt, packed, as far as it is
    computed.
    """

    rules: LogprobRules
    size_class: int
    gives_next: bool
    prompt: Ints
    parts: list[bytes]


@dataclass(slots=True)
class RequestRow:
    """An open request.

    history: its tokens, [more than there are] int64, where penalties read them on a CPU. token_ids: on a GPU,
    where ``runner.sampling.token_counts`` counts them for penalties, those that it was opened with; else empty.
    prompt_states: hidden states of its prompt, as far as it is computed; None where they are not wanted (any more).
    second_text: where the second text of a pair begins; 0: there is none.
    embeds: [num_prompt, D] of a prompt that is embeddings, until it is computed; ids then begin at ``first_id``.
    constraint: of a request with a grammar. may_jump: whether forced tokens need not be drawn.
    forced: the forced tokens of its last jump. forced_end: how many tokens it had after them.
    is_pooled: whether it is of the kind POOL.
    is_long: as in ``NewRow``.
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
    may_jump: bool = False
    forced: Sequence[int] = ()
    forced_end: int = 0
    is_pooled: bool = False
    is_long: bool = False
    lists: TokenLists | None = None
    recent: Tensor | None = None

    def constraint_at(self, position: int) -> RowConstraint | None:
        """Return the tokens that its grammar allows at ``position``. After a jump, a step in flight draws a token that
        is already known.
        """
        if self.constraint is None or position >= self.forced_end:
            return self.constraint
        return Forced(self.forced[position - self.forced_end], self.constraint.source)


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The S rows of a step that give a token. ``positions``: the place of the new token in its request."""

    requests: list[RequestRow]
    row_indices: Ints
    positions: Ints
    records: npt.NDArray[np.void]  # of SAMPLING_RECORD

    def constraints(self) -> list[RowConstraint | None]:
        """What the token of each row keeps to."""
        return [
            request.constraint_at(position)
            for request, position in zip(self.requests, self.positions.tolist(), strict=True)
        ]

    def part(self, chosen: Ints) -> SampledRows:
        """The ``chosen`` [X] of them."""
        requests = [self.requests[i] for i in chosen.tolist()]
        return SampledRows(requests, self.row_indices[chosen], self.positions[chosen], self.records[chosen])


class RowTable:
    """The open requests and their tables, whose memory never moves: CUDA graphs read it.

    Args:
        page_tables: for ``max_rows`` requests.
        num_embeddings: token ids are below this.
        max_rows: requests that can be open at once.
        adapters: the slots of adapters; None: all requests use the base model.

    Attributes:
        requests: the open requests by uid.
        page_tables: their pages.
        last_tokens: [2 * max_rows] int64 on the device, by row index; those from ``max_rows`` on are memory for other
            tokens of a step.
        sampling: [max_rows] of SAMPLING_RECORD.
        num_opened: requests opened so far; while it stays the same, a row belongs to the same request.
        num_pooled: open requests of the kind POOL. num_with_grammar, num_with_logprobs, num_with_states: those that
            have a grammar, that want logprobs, that want hidden states.
        num_with_embeds: those whose embeddings were not all computed.
        adapters: their adapters.
        images: the images of open requests; None for a model that reads none.
        mask_bit: the bit of the processor of grammars in ``SAMPLING_RECORD``.
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
            ValueError: a parameter or a token that would harm the rows beside it, or too many requests are open.
        """
        self._check(opened)
        if not self._free_indices:
            message = f"{len(self.requests)} requests are open, and no more can be"
            raise ValueError(message)
        history, token_ids = None, list[int]()
        is_on_gpu = self.last_tokens.is_cuda
        if is_on_gpu and opened.sampling.has_penalties:
            token_ids = opened.token_ids
        first_id = opened.num_prompt if opened.embeds else 0
        known = list[int]()
        if opened.sampling.bad_token_ids or opened.sampling.has_penalties:
            known = [*[NO_TOKEN] * first_id, *opened.token_ids[first_id:]]
        if opened.sampling.has_penalties and not is_on_gpu:
            history = self.upload(np.array([*known, *[0] * 64], dtype=np.int64))
        row_index = self._free_indices.pop()
        request = RequestRow(opened.uid, row_index, opened.sampling, opened.num_prompt, history, token_ids)
        self.requests[opened.uid] = request  # from here on ``close`` undoes what a failure leaves
        self.num_opened += 1
        request.is_pooled = opened.kind is RequestKind.POOL
        request.is_long = opened.is_long
        self.adapters.open(row_index, opened.adapter_slot)
        request.lists = token_lists(opened.sampling, self._num_embeddings, self.upload)
        if opened.sampling.bad_token_ids:
            request.recent = self._open_recent(row_index, known)
        self.num_pooled += request.is_pooled
        self.num_with_grammar += opened.sampling.grammar is not None
        self.num_with_states += bool(opened.sampling.hidden_states)
        request.second_text = opened.second_text
        if opened.embeds:
            request.embeds = np.frombuffer(opened.embeds, np.float32).reshape(opened.num_prompt, -1)
            request.first_id = first_id
            self.num_with_embeds += 1
        if opened.media:
            if self.images is None:
                message = "the prompt has images, and the model reads none"
                raise ValueError(message)
            self.images.open(opened, row_index)
        if opened.logprobs is not None:
            request.logprobs = _row_logprobs(opened, opened.logprobs)
            self.num_with_logprobs += 1
        if opened.sampling.hidden_states == ALL_STATES and len(opened.token_ids) == opened.num_prompt:
            request.prompt_states = []
        if opened.kind is RequestKind.GENERATE:
            self.sampling[row_index] = self._record(opened.sampling)
        self.page_tables.open(row_index)
        self.page_tables.add(row_index, opened.pages)

    def close(self, uid: int) -> None:
        """Close a request; an unknown one is ignored."""
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
        """Its prompt is computed."""
        if request.embeds is not None:
            request.embeds = None
            self.num_with_embeds -= 1

    def encode_images(self, rows: list[Row]) -> dict[int, str]:
        """Have the features of all images that these rows need; returns by uid why those of a request cannot be had."""
        return {} if self.images is None else self.images.encode(rows)

    def pages(self, uid: int) -> list[int]:
        """Pages of the pool that a request has, in order; empty for one that is not known."""
        request = self.requests.get(uid)
        return [] if request is None else self.page_tables.pages(request.row_index)

    @property
    def page_table(self) -> npt.NDArray[np.int32]:
        """[max_rows, max_row_pages] on the host: the page table of the first group of layers, or of all."""
        return self.page_tables.tables[0]

    def sampled(self, requests: list[RequestRow], row_indices: Ints, positions: Ints) -> SampledRows:
        """These requests as S rows that sample: row_indices [S], positions [S]."""
        return SampledRows(requests, row_indices, positions, self.sampling[row_indices])

    def write_tokens(self, rows: SampledRows, token_ids: Tensor) -> None:
        """Store the sampled tokens [S] of these rows."""
        usable = token_ids.clamp(min=0)  # a row that failed has -1, which no embedding has
        self.last_tokens.index_copy_(0, self.upload(rows.row_indices), usable)
        if not rows.records["processors"].any():
            return
        for i, request in enumerate(rows.requests):
            if request.history is not None:
                position = int(rows.positions[i])
                history = _with_room(request.history, position + 1)
                history[position] = usable[i]
                request.history = history
        if self._recent is not None:
            users = np.array([i for i, request in enumerate(rows.requests) if request.recent is not None], np.int64)
            places = rows.row_indices[users], rows.positions[users] % RECENT_TOKENS
            self._recent[self.upload(places[0]), self.upload(places[1])] = usable[self.upload(users)].int()

    def _open_recent(self, row_index: int, known: list[int]) -> Tensor:
        """``RequestRow.recent`` [R] of a request with the tokens ``known``."""
        if self._recent is None:
            shape = len(self.sampling), RECENT_TOKENS
            self._recent = torch.empty(shape, dtype=torch.int32, device=self.last_tokens.device)
        start = max(0, len(known) - RECENT_TOKENS)
        held = np.full(RECENT_TOKENS, NO_TOKEN, dtype=np.int32)
        held[np.arange(start, len(known)) % RECENT_TOKENS] = known[start:]
        return self._recent[row_index].copy_(self.upload(held))

    def _check(self, opened: NewRow) -> None:
        sampling = opened.sampling
        rules = opened.logprobs
        if opened.kind is RequestKind.SCORE and rules is None:
            message = "a request of kind SCORE has logprobs"
            raise ValueError(message)
        longest = max(map(len, sampling.bad_token_ids), default=0)
        if longest > RECENT_TOKENS:
            message = f"bad_words: one of them is {longest} tokens long; at most {RECENT_TOKENS}"
            raise ValueError(message)
        if rules is not None and rules.num_top > self._num_embeddings:
            message = f"the likeliest {rules.num_top} tokens of a vocabulary of {self._num_embeddings}"
            raise ValueError(message)
        if len(sampling.bias_token_ids) != len(sampling.logit_bias):
            message = f"{len(sampling.bias_token_ids)} bias_token_ids, but {len(sampling.logit_bias)} values"
            raise ValueError(message)
        ids = (*sampling.bias_token_ids, *sampling.suppressed_token_ids, *sampling.allowed_token_ids)
        ids = (*ids, *chain.from_iterable(sampling.bad_token_ids))
        if rules is not None:
            ids = (*ids, *rules.token_ids)
        if sampling.has_penalties or (rules is not None and rules.start >= 0):
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


def _row_logprobs(opened: NewRow, rules: LogprobRules) -> RowLogprobs:
    prompt = np.array(opened.token_ids[: opened.num_prompt] if rules.start >= 0 else (), dtype=np.int64)
    parts: list[bytes] = []
    if rules.start == 0:  # position 0 has an id alone
        first = np.zeros(rules.position_bytes // 4, dtype=np.int32)
        first[rules.num_values] = prompt[0]
        parts.append(first.tobytes())
    size_class = rules.num_values.bit_length() if rules.num_values > FEW_VALUES else 0
    return RowLogprobs(rules, size_class, opened.kind is RequestKind.SCORE, prompt, parts)


def logits_row(index: int, request: RequestRow, position: int) -> LogitsRow:
    """The ``index``-th row of the logits, which give the token at ``position`` of the request."""
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


def _with_room(history: Tensor, size: int) -> Tensor:
    """history [X] in a tensor of at least ``size`` entries."""
    if size <= len(history):
        return history
    return torch.cat([history, history.new_zeros(max(len(history), size - len(history)))])

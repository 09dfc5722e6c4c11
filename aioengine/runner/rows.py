"""The runner's state of open requests: last tokens, sampling parameters, page tables.

A request has a row of the tables, at its row index, from the step that opens it to the step that closes it. Sampling
parameters are one numpy record per row, so that a step gathers columns at once. The last token stays on the device; the
next step reads it there.

R rows of a step, S rows that sample.
"""

from __future__ import annotations

from copy import copy
from typing import Final

import numpy as np
import torch
from torch import Tensor

from aioengine.kernels.arrays import Ints64
from aioengine.protocol.columns import NO_TOKEN
from aioengine.protocol.messages import ALL_STATES, SEED_MASK, RequestKind, Sampling
from aioengine.protocol.packed_logprobs import LogprobRules
from aioengine.runner.images import Images
from aioengine.runner.logits import LogitsProcessor
from aioengine.runner.logits.grammar import GrammarMask
from aioengine.runner.lora.grouping import GroupRows, RowAdapters
from aioengine.runner.page_tables import PageTables
from aioengine.runner.request_row import RequestRow, RowLogprobs, SampledRows
from aioengine.runner.token_lists import token_lists
from aioengine.runner.transfer import upload_to
from aioengine.scheduler.plan import NewRow

RECENT_TOKENS: Final = 512
"""Recent tokens kept for a request with bad words. Also the maximum length of a bad word in tokens."""

FEW_VALUES = 64
"""Requests with up to this number of logprobs per position are computed together, with the largest number among them.
"""

TOP_K_OFF = 1 << 30
"""The ``top_k`` in ``SAMPLING_RECORD`` that keeps all tokens."""

SAMPLING_RECORD = np.dtype(
    [
        ("is_plain_greedy", np.bool_),  # greedy, and no processor
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


class RowTable:
    """The open requests and their tables, in memory with fixed addresses, because CUDA graphs read it.

    Args:
        page_tables: for ``max_rows`` requests.
        max_rows: maximum number of open requests.
        adapters: the adapter slots; None: all requests use the base model.
        max_drafts: maximum drafts of a row.

    Attributes:
        num_embeddings: token ids are below this.
        processors: of the logits. mask_bit: the bit of the grammar processor in ``SAMPLING_RECORD``.
        upload: copies a host array to the device, see ``Upload``.
        requests: uid -> open request.
        page_tables: their pages.
        last_tokens: [(3 + 3 * max_drafts) * max_rows + 1] int64 on the device, in this order:
            [max_rows] the last token of each row, by row index;
            [(1 + max_drafts) * max_rows] the known tokens of a step whose rows a graph expands;
            [(1 + max_drafts) * max_rows] the tokens that the last step with drafts sampled (``draft_indices``);
            [max_drafts * max_rows] the drafts of a draft model (``draft_indices``);
            [1] an entry that is never read.
        first_draft: the first index of drafts in ``last_tokens``.
        rejected: [max_rows + 1] int32 on the device, by row index: how many drafts the last step with drafts has
            rejected. The last entry is 0.
        is_upper_bound: [max_rows] bool: the next position of the row is an upper bound (``speculation.proposer``).
        is_unread: [max_rows] bool: only the device has the last token of the row.
        has_upper_bounds: positions of steps may be upper bounds.
        sampling: [max_rows] of SAMPLING_RECORD.
        num_opened: number of requests opened so far. While it is unchanged, rows belong to the same requests.
        num_pooled: number of open requests of kind POOL.
        num_with_grammar, num_with_logprobs, num_with_hidden_states: number of open requests with a grammar, with
            logprobs, with hidden states.
        num_with_embeds: number of open requests whose prompt embeddings are not all computed.
        adapters: the adapter slot of each row.
        images: the images of open requests; None: the model reads no images.
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
        group_by_adapter: GroupRows | None = None,
        max_drafts: int = 0,
    ) -> None:
        self.requests: dict[int, RequestRow] = {}
        self.page_tables = page_tables
        self.last_tokens = torch.zeros((3 + 3 * max_drafts) * max_rows + 1, dtype=torch.int64, device=device)
        self.first_draft = (3 + 2 * max_drafts) * max_rows
        self.rejected = torch.zeros(max_rows + 1, dtype=torch.int32, device=device)
        self.is_upper_bound, self.is_unread = np.zeros((2, max_rows), dtype=np.bool_)
        self.max_drafts = max_drafts
        self.has_upper_bounds = False
        self.sampling = np.zeros(max_rows, dtype=SAMPLING_RECORD)
        self.upload = upload_to(device)
        self.num_opened = self.num_pooled = self.num_with_embeds = 0
        self.num_with_grammar = self.num_with_logprobs = self.num_with_hidden_states = 0
        self.images = images
        self.adapters = RowAdapters(max_rows, group_by_adapter)
        self.num_embeddings = num_embeddings
        self.processors = processors
        self.mask_bit = self.processor_bits(GrammarMask)
        self._recent: Tensor | None = None
        self._free_indices = list(range(max_rows - 1, -1, -1))

    def processor_bits(self, *kinds: type) -> int:
        """Return the bits in ``SAMPLING_RECORD`` of the processors of these kinds."""
        return sum(1 << i for i, processor in enumerate(self.processors) if isinstance(processor, kinds))

    def draft_indices(self, number: Ints64 | int, row_indices: Ints64) -> Ints64:
        """Return the indices [R] in ``last_tokens`` of the drafts with this number, from 0 on, of these rows [R].

        Number -1 - i is the token that the last step with drafts has sampled after the first i drafts of the row.
        """
        return self.first_draft + number * len(self.sampling) + row_indices

    def store_drafts(self, number: int, row_indices: Ints64, token_ids: Tensor) -> None:
        """Store the drafts [R] with this number of these rows."""
        indices = self.upload(self.draft_indices(number, row_indices))
        self.last_tokens.index_copy_(0, indices, token_ids.clamp(min=0))

    def for_draft_model(self) -> RowTable:
        """Return a table of the same requests for a draft model, which has one page group, and neither adapters nor
        images. It shares tensors and arrays. Its numbers of open requests stay 0.
        """
        table = copy(self)
        table.page_tables = copy(self.page_tables)
        table.page_tables.tables, table.page_tables.groups = self.page_tables.tables[:1], None
        table.adapters, table.images = RowAdapters(len(self.sampling)), None
        return table

    def open(self, opened: NewRow) -> None:
        """Open a request.

        Raises:
            ValueError: a bad word is too long, or an image does not match the prompt.
        """
        sampling = opened.sampling
        longest = max(map(len, sampling.bad_token_ids), default=0)
        if longest > RECENT_TOKENS:
            raise ValueError(f"bad_words: a word has at most {RECENT_TOKENS} tokens, got one of {longest}")
        row_index = self._free_indices.pop()
        request = RequestRow(
            opened.uid,
            row_index,
            sampling,
            opened.num_prompt,
            second_text=opened.second_text,
            first_id=opened.num_prompt if opened.embeds else 0,
            is_pooled=opened.kind is RequestKind.POOL,
            is_long=opened.is_long,
            lists=token_lists(sampling, self.num_embeddings, self.upload),
        )
        self.requests[opened.uid] = request  # from here on, ``close`` cleans up after an error
        self.num_opened += 1
        self.num_pooled += request.is_pooled
        self.num_with_grammar += sampling.grammar is not None
        self.num_with_hidden_states += bool(sampling.hidden_states)
        self.adapters.open(row_index, opened.adapter_slot)
        if sampling.has_penalties and self.last_tokens.is_cuda:
            request.token_ids = opened.token_ids
        elif sampling.has_penalties:
            request.history = self.upload(np.array([*_known_ids(opened), *[0] * 64], dtype=np.int64))
        if sampling.bad_token_ids:
            request.recent = self._open_recent(row_index, _known_ids(opened))
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
            self.num_with_hidden_states -= bool(request.sampling.hidden_states)
            self.num_with_embeds -= request.embeds is not None
            if self.images is not None:
                self.images.close(uid, request.row_index)
            self.adapters.close(request.row_index)

    def pages(self, uid: int) -> list[int]:
        """Return the pages of a request, in order; empty for an unknown uid."""
        request = self.requests.get(uid)
        return [] if request is None else self.page_tables.pages(request.row_index)

    def sampled(self, requests: list[RequestRow], row_indices: Ints64, positions: Ints64) -> SampledRows:
        """Return these requests as S rows that sample, with row_indices [S] and positions [S]."""
        return SampledRows(requests, row_indices, positions, self.sampling[row_indices])

    def write_tokens(self, rows: SampledRows, token_ids: Tensor) -> None:
        """Store the sampled tokens [S] of these rows."""
        valid = token_ids.clamp(min=0)  # a failed row has -1, which has no embedding
        self.last_tokens.index_copy_(0, self.upload(rows.row_indices), valid)
        if not rows.records["processors"].any():
            return
        self.write_history(rows, valid)
        if self._recent is not None:
            users = np.array([i for i, request in enumerate(rows.requests) if len(request.recent)], np.int64)
            columns = self.upload(rows.positions[users] % RECENT_TOKENS)
            self._recent[self.upload(rows.row_indices[users]), columns] = valid[self.upload(users)].int()

    def write_history(self, rows: SampledRows, token_ids: Tensor) -> None:
        """Store the tokens [S] of these rows in ``RequestRow.history``. Later tokens are ignored by penalties."""
        for i, request in enumerate(rows.requests):
            if size := len(request.history):
                position = int(rows.positions[i])
                if position >= size:
                    request.history = torch.cat([request.history, torch.zeros_like(request.history)])
                request.history[position] = token_ids[i]

    def _open_recent(self, row_index: int, token_ids: list[int]) -> Tensor:
        """Return ``RequestRow.recent`` [RECENT_TOKENS] of a request with these tokens."""
        if self._recent is None:
            shape = len(self.sampling), RECENT_TOKENS
            self._recent = torch.empty(shape, dtype=torch.int32, device=self.last_tokens.device)
        start = max(0, len(token_ids) - RECENT_TOKENS)
        recent = np.full(RECENT_TOKENS, NO_TOKEN, dtype=np.int32)
        recent[np.arange(start, len(token_ids)) % RECENT_TOKENS] = token_ids[start:]
        return self._recent[row_index].copy_(self.upload(recent))

    def _record(self, sampling: Sampling) -> tuple[bool, bool, bool, int, float, int, float, float, int]:
        has_top_k = 0 < sampling.top_k < self.num_embeddings
        is_greedy = sampling.is_greedy
        processors = sum(1 << i for i, processor in enumerate(self.processors) if processor.wants(sampling))
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


def _known_ids(opened: NewRow) -> list[int]:
    """Return the token ids of a request, with NO_TOKEN for a prompt given as embeddings."""
    return [NO_TOKEN] * opened.num_prompt + opened.token_ids[opened.num_prompt :] if opened.embeds else opened.token_ids


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

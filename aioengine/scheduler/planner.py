"""Planner: fills one step with rows, and advances the counts of the requests.

Decode rows come first, in the order of ``running``: one for each running request whose newest token is in the runner.
So decoding requests advance in every step, however long the prompts are. The remaining token budget is divided among
the prompts of running requests, then among waiting requests that can be admitted. ``request`` defines ``decodes``,
``has_forced`` and ``holds_last``, which decide the kind of a row.

A decode row has more than one position if it has forced tokens or drafts. ``drafting`` decides how many drafts, and
``ngrams`` looks them up, unless a draft model proposes them. The next plan assumes that all drafts are accepted, and
allocates pages for them. Rejected drafts lower the counts of the request when their result is applied; the request
keeps the pages for its next tokens.
"""

from __future__ import annotations

from msgspec import Struct

from aioengine.memory.prefix_cache import Allocation
from aioengine.memory.snapshots import NO_SNAPSHOT
from aioengine.memory.windowed_cache import WindowedCache
from aioengine.protocol.messages import RequestKind
from aioengine.scheduler.admission import Admission, ImageBudget, Refusal, TokenBudget
from aioengine.scheduler.drafting import Acceptance, DraftCosts
from aioengine.scheduler.ngrams import NgramProposer
from aioengine.scheduler.plan import DISTRIBUTION, NOTHING, TOKENS, VECTOR, NewRow, Row, StepPlan
from aioengine.scheduler.request import Request
from aioengine.scheduler.request_states import Requests
from aioengine.settings.config import SchedulerSettings

OUTPUTS = {RequestKind.GENERATE: TOKENS, RequestKind.POOL: VECTOR, RequestKind.SCORE: DISTRIBUTION}
"""``Row.outputs`` at the end of a prompt."""

MAX_LATER = 64  # requests that may be passed over in a step because of a prefix: each costs a cache lookup


class PlanInFlight(Struct):
    """A plan in flight, with the request of each row and the allocation of this request at planning time.

    num_chunk_tokens: positions of all rows except decode rows of one position. num_drafts: positions of drafts.
    num_draft_row_tokens: of ``num_chunk_tokens``, positions of decode rows with drafts, without forced tokens.
    rejected: uid -> number of drafts that were rejected since the launch. The row starts this many positions before
        its planned start.
    """

    plan: StepPlan
    planned_at: float
    num_chunk_tokens: int = 0
    num_drafts: int = 0
    num_draft_row_tokens: int = 0
    requests: list[Request] = []
    allocations: list[Allocation] = []
    rejected: dict[int, int] = {}

    def add(self, row: Row, request: Request) -> None:
        """Add a row of ``request`` and advance its counts as if the row were computed."""
        self.num_chunk_tokens += row.count
        if row.num_drafts:
            self.num_drafts += row.num_drafts
            if row.count == 1 + row.num_drafts:
                self.num_draft_row_tokens += row.count
        self.plan.rows.append(row)
        self.requests.append(request)
        self.allocations.append(request.allocation)
        request.num_computed += row.count
        if row.outputs == TOKENS:
            request.num_tokens += 1 + row.num_drafts
            request.num_drafts += row.num_drafts
            request.holds_last = True
            request.decodes = True


class Planner:
    """Fills flights with rows. Only the planner admits and preempts requests."""

    def __init__(self, settings: SchedulerSettings, requests: Requests, draft_costs: DraftCosts | None = None) -> None:
        """draft_costs: None if rows have no drafts."""
        self._settings = settings
        self._draft_costs = draft_costs
        self._is_overlapped = False
        self._requests = requests
        self._snapshots = requests.cache.snapshots
        self._admission = Admission(requests.cache, settings.chunk_tokens)
        # Prompts of up to this many tokens are not split, unless long prompts share the budget: their second part would
        # need other attention kernels, which take longer than the unused tokens of this step.
        self._max_unsplit = settings.chunk_tokens // 16 if settings.splits_prompts else settings.context_length

    def fill(self, flight: PlanInFlight, now: float, *, is_overlapped: bool = False) -> None:
        """Fill ``flight`` with the rows of the next step. is_overlapped: other steps are in flight.

        Requests with a closed gate get no row. Preemption takes the last running request, so a request that already has
        a row in this step keeps its pages.
        """
        self._is_overlapped = is_overlapped
        prompts: list[Request] = []
        rows, requests, allocations = flight.plan.rows, flight.requests, flight.allocations
        costs = self._draft_costs  # None: this step should have no drafts
        if costs is not None and costs.is_plain_due(len(self._requests.running)):
            costs = None
        for request in self._requests.running:
            start = request.num_computed
            if request.decodes:
                if start + 1 >= request.next_limit:
                    continue  # its last token is in flight
            elif not request.num_missing or request.gates:
                continue  # gated, or its last row is in flight
            elif request.has_forced and request.num_drafts:
                continue  # the row of its forced tokens needs an exact start
            elif not request.has_forced:  # a prompt
                if request.allocation.capacity >= request.num_tokens or self._allocate_chunk(request):
                    prompts.append(request)
                continue
            if costs is not None or not request.decodes:  # drafts may be added, or there are forced tokens
                num_drafts = 0 if costs is None else self._num_drafts(request, costs)
                if num_drafts or not request.decodes:
                    if (row := self._row_of_several_tokens(request, flight, num_drafts)) is not None:
                        flight.add(row, request)
                    continue
            allocation = request.allocation
            if start < allocation.capacity:
                row = Row(request.uid, start, 1, TOKENS)
            else:
                pages = self._grow(request)
                if pages is None:
                    continue
                row = Row(request.uid, start, 1, TOKENS, [], pages)
            rows.append(row)  # as in ``PlanInFlight.add``; most rows are such decodes, and a call would cost time
            requests.append(request)
            allocations.append(allocation)
            request.num_computed = start + 1
            request.num_tokens += 1
        if prompts or self._requests.waiting:
            self._place_prompts(flight, prompts, now)
        if (snapshots := self._snapshots) is None:
            return
        for row, allocation in zip(flight.plan.rows, flight.allocations, strict=True):
            end = row.start + row.count
            if end % snapshots.span == 0 and allocation.snapshots is not None:
                snapshot_id = snapshots.take(allocation.snapshots, end)
                if snapshot_id != NO_SNAPSHOT:
                    flight.plan.snapshots.append((row.uid, snapshot_id))

    def _num_drafts(self, request: Request, costs: DraftCosts) -> int:
        """Return how many drafts this request gets, and look them up if they are n-grams."""
        if request.acceptance is None:
            request.acceptance = Acceptance(costs.rate)
        elif request.acceptance.is_paused():
            return 0
        count = request.acceptance.count(costs.price(len(self._requests.running)), self._settings.max_drafts)
        if not count or not self._settings.has_ngrams:
            return count
        submit, in_flight = request.submit, None
        if self._settings.depth and submit.sampling.grammar is not None:
            return 0  # a step in flight may sample a forced token again
        if num_unknown := request.num_tokens - len(request.token_ids):
            in_flight = request.drafts if request.num_drafts else []
            if num_unknown > 1 + len(in_flight):  # of several steps in flight
                return 0
        if request.ngrams is None:
            # embeddings have no ids, and images have ids only for the prefix cache
            first = max((image.start + image.num_tokens for image in submit.media), default=0)
            request.ngrams = NgramProposer(request.token_ids, first=request.num_prompt if submit.embeds else first)
        request.expected_id, request.drafts = request.ngrams.propose(count, in_flight)
        if not request.drafts:
            request.acceptance.note(0, 0)
        return len(request.drafts)

    def _row_of_several_tokens(self, request: Request, flight: PlanInFlight, num_drafts: int) -> Row | None:
        """Return a row for the forced tokens of a request, or its newest token, and up to ``num_drafts`` drafts after
        them. Return None if the request was preempted, or waits for pages.

        The row has at least one token. It leaves an eighth of the token budget to prompts, and its drafts half of the
        budget while requests wait. Drafts preempt no request.
        """
        chunk_tokens = self._settings.chunk_tokens
        budget = chunk_tokens - chunk_tokens // 8 - len(self._requests.running) - flight.num_chunk_tokens
        start = request.num_computed
        end = min(request.num_tokens, start + max(budget, 1))
        pages: list[int] = []
        while request.allocation.capacity < end:
            new_pages = self._grow(request)
            if new_pages is None:
                if request.allocation.capacity <= start:
                    return None
                end = request.allocation.capacity
                break
            pages += new_pages
        token_ids = [] if request.holds_last else request.ids_to_compute(start, end)
        request.has_forced = end < request.num_tokens
        if request.has_forced:
            return Row(request.uid, start, end - start, NOTHING, token_ids, pages)
        if self._requests.waiting:
            budget -= chunk_tokens // 2
        num_drafts = max(0, min(num_drafts, budget - (end - start), request.next_limit - 1 - end))
        while (capacity := request.allocation.capacity) < end + num_drafts:
            new_pages = self._requests.cache.grow(request.allocation)
            if new_pages is None:
                num_drafts = capacity - end
            else:
                pages += new_pages
        drafts = request.drafts = request.drafts[:num_drafts]
        count = end - start + num_drafts
        return Row(request.uid, start, count, TOKENS, token_ids, pages, num_drafts, drafts, request.expected_id)

    def _grow(self, request: Request) -> list[int] | None:
        """Allocate pages for the next position, preempting other requests if none is left. Return None if the request
        must wait.

        The last running request is preempted, even if it is ``request``. If it is also the only one, it first waits for
        its steps in flight. Otherwise it could be admitted again and lose the same tokens again and again. A chunk in
        flight may also release some of its pages.
        """
        running = self._requests.running
        while (pages := self._requests.cache.grow(request.allocation)) is None:
            if len(running) == 1 and (self._is_overlapped or request.num_tokens > len(request.token_ids)):
                return None
            if self._requests.preempt() is request:
                return None
        return pages

    def _allocate_chunk(self, request: Request) -> bool:
        """Allocate pages for the next ``min_tokens`` tokens of a prompt whose pages are allocated chunk by chunk
        (``WindowedCache``). Return False if it gets no row in this step.
        """
        allocation = request.allocation
        end = min(request.num_tokens, request.num_computed + self._settings.min_tokens)
        while allocation.capacity < end:
            pages = self._grow(request)
            if pages is None:
                return False
            allocation.unsent += pages
        return True

    def _extend(self, request: Request, count: int) -> int:
        """Allocate pages for the next ``count`` tokens of a prompt. Return how many tokens have pages."""
        allocation = request.allocation
        while allocation.capacity < request.num_computed + count:
            pages = self._requests.cache.grow(allocation)
            if pages is None:
                return allocation.capacity - request.num_computed if self._settings.splits_prompts else 0
            allocation.unsent += pages
        return count

    def _place_prompts(self, flight: PlanInFlight, prompts: list[Request], now: float) -> None:
        """Divide the rest of the budget among prompts: the first running prompt, then short running prompts, then
        new prompts.
        """
        num_placed = flight.num_chunk_tokens + self._settings.decode_cost * len(flight.requests)
        budget = TokenBudget(self._settings.chunk_tokens, num_placed)
        prompts[1:] = sorted(prompts[1:], key=lambda request: request.num_missing)
        shares: list[tuple[Request, int]] = []
        num_partial = 0
        for request in prompts:
            share = budget.take_share(request.num_missing)
            num_partial += share < request.num_missing
            shares.append((request, share))
        if self._requests.waiting and budget.left and len(self._requests.running) < self._settings.max_running:
            self._admit(flight, budget, shares, num_partial, now)
        images: ImageBudget | None = None
        for request, share in shares:
            allocation, start = request.allocation, request.num_computed
            count = share + budget.take_rest(request.num_missing - share)
            if allocation.capacity < start + count:
                count = self._extend(request, count)
            if request.submit.media:
                images = images or ImageBudget(
                    self._settings.chunk_tokens, keeps_whole=self._settings.whole_image_tokens > 0
                )
                is_first = start == allocation.num_matched * self._requests.cache.page_size
                count = images.limited(request.submit.media, start, count, is_first=is_first)
                if self._extend(request, count) < count:  # an image must not be split, so it waits for its pages
                    count = 0
            if count and self._snapshots is not None and allocation.snapshots is not None:
                # The row may have to end at a snapshot.
                end = self._snapshots.end_of_row(allocation.snapshots, start, start + count, request.num_tokens)
                budget.left += start + count - end
                count = end - start
            if count:
                outputs = OUTPUTS[request.kind] if count == request.num_missing else NOTHING
                pages, allocation.unsent = allocation.unsent, []
                token_ids = request.ids_to_compute(start, start + count)
                flight.add(Row(request.uid, start, count, outputs, token_ids, pages), request)

    def _admit(
        self, flight: PlanInFlight, budget: TokenBudget, shares: list[tuple[Request, int]], num_partial: int, now: float
    ) -> None:
        """Admit waiting requests, and append them and their shares of ``budget`` to ``shares``."""
        running, cache = self._requests.running, self._requests.cache
        windowed = cache if isinstance(cache, WindowedCache) else None
        num_later = promised = 0
        if windowed is not None:
            promised = sum(windowed.num_promised(other.allocation, other.num_tokens) for other in running)
        for request in self._requests.candidates():
            if request.gates and self._admission.waits(request):  # requests with other gates are not in the queue
                continue
            adapter = request.submit.adapter
            if adapter is not None and self._requests.wait_unless_ready(request, adapter):
                continue
            num_tokens = request.num_tokens
            is_whole = num_tokens <= self._max_unsplit and not (num_partial and self._settings.splits_prompts)
            if is_whole and budget.left < min(num_tokens, self._settings.chunk_tokens):
                return  # it will be the first of the next step
            answer = self._admission.ask(request, running, left=budget.left, num_partial=num_partial, promised=promised)
            if answer is Refusal.LATER:
                num_later += self._admission.waits(request)
                if num_later == MAX_LATER:
                    self._requests.is_blocked = False  # the next step continues with the others
                    return
                continue
            if isinstance(answer, Refusal):
                return
            self._requests.admit(request, answer, now)
            if windowed is not None:
                promised += windowed.num_promised(request.allocation, request.num_tokens)
            new_row = _new_row(request)
            if adapter is not None:
                new_row.adapter_slot = self._requests.adapters.slot_of(request.uid)
            flight.plan.new_rows.append(new_row)
            num_partial += request.num_missing > budget.left
            take = budget.take_share if self._settings.splits_prompts else budget.take_whole
            shares.append((request, take(request.num_missing)))
            if not budget.left or len(running) >= self._settings.max_running:
                return


def _new_row(request: Request) -> NewRow:
    return NewRow(
        request.uid,
        request.submit.sampling,
        request.num_prompt,
        request.ids_to_compute(0, len(request.token_ids)),
        request.allocation.pages.copy(),
        request.kind,
        request.logprobs,
        request.submit.second_text,
        request.submit.embeds,
        media=request.submit.media,
        is_long=request.is_long,
        snapshot=NO_SNAPSHOT if request.allocation.snapshots is None else request.allocation.snapshots.source,
    )

"""Request: one prompt to continue or to pool, as the scheduler sees it, and the rules that end it.

It has ``num_tokens`` positions that are known or in flight, and ``num_computed`` positions whose KV is written or will
be written by the steps launched so far. Scheduling lets the second number catch up with the first. A prompt, a chunk of
a prompt, the rest after a prefix hit, and a decode are the same case.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from msgspec.structs import replace

from aioengine.memory.prefix_cache import Allocation
from aioengine.memory.radix import Node, Salt
from aioengine.protocol.messages import ALL_STATES, End, FinishCode, Media, RequestKind, Submit
from aioengine.protocol.packed_logprobs import LogprobRules
from aioengine.scheduler.drafting import Acceptance
from aioengine.scheduler.ngrams import NgramProposer

NO_PAGES = Allocation()  # the allocation of every request that is not running; never changed


class State(Enum):
    """WAITING: in the queue, without pages. RUNNING: has pages. GATED: outside the queue, without pages, until its
    gates are open. ENDED: finished, aborted or failed.
    """

    WAITING = 0
    RUNNING = 1
    GATED = 2
    ENDED = 3


class Gate(Enum):
    """The reasons for which a request must wait. ``Request.gates`` is the set of closed gates.

    While a gate is closed, no new step computes the request. When all gates are open, it continues. Aborts and
    deadlines always work.

        gate       closed when                                           pages of a running request
        PREFIX     another request is computing the request's prefix     (it has none yet)
        SUSPENDED  the reader does not read (``slow_reader="pause"``)    released
        GRAMMAR    the grammar is being compiled                         kept
        ADAPTER    the adapter is read, copied, or waits for a slot      (it has none yet)

    PREFIX and ADAPTER belong to admission. PREFIX opens by itself when the other request has computed the pages or has
    ended. ADAPTER is opened by ``Requests.requeue``. The other gates are closed and opened by ``Requests.close_gate``
    and ``open_gate``.

    The table in ``request_states`` has the state of a request with closed gates.
    """

    PREFIX = 0
    SUSPENDED = 1
    GRAMMAR = 2
    ADAPTER = 3

    @property
    def keeps_pages(self) -> bool:
        """Whether a running request keeps its pages while this gate is closed."""
        return self is not Gate.SUSPENDED


class Request:
    """One request. Only ``Scheduler`` and its parts (``Requests``, ``Planner``, ``Admission``) change it.

    order: its unique position in the queue (the smallest is first); set by the policy.
    running_order: its position among the running requests; the last one is preempted first.
    max_tokens: maximum number of prompt and output tokens.
    next_limit: the number of prompt and output tokens at which it ends, or is recomputed because its RoPE changes.
    token_ids: known prompt and output tokens. Image positions have the ids of ``with_image_keys``.
    holds_last: whether the runner holds the newest token, so that a row does not carry it.
    kind: POOL ends with its vector, SCORE with its logprobs; both have no output tokens.
    gates: the closed gates.
    decodes: whether its next row is a decode: the runner holds the newest token, and all gates are open.
    allocation: its pages, ``NO_PAGES`` while it is not running; a new one after each preemption. A row in flight is
        late if its request has another allocation than at the launch.
    has_forced: it has forced tokens that no row has computed. The runner does not hold them, so a row must carry them.
    short_length: longer requests use long RoPE factors for all positions. A request that reaches this length is
        recomputed, so until then ``next_limit`` is ``short_length + 1``. 0: RoPE does not depend on the length.
    is_long: whether it uses long RoPE factors since its last admission.
    waits_for: the last node of its prefix that another request is computing or taking a snapshot of.
    num_drafts: drafts of its rows in flight. Until they are accepted, ``num_tokens`` and ``num_computed`` are upper
        bounds.
    acceptance: of its drafts; None: it had none.
    ngrams: looks up its drafts; None: it had none. drafts, expected_id: as in ``Row``, of its newest n-gram.
    admitted_at: time of its first admission. num_cached: prompt tokens that it took from the prefix cache then.
    num_charged: tokens charged to its tenant. is_text_open: whether its first token was reported.
    """

    def __init__(self, submit: Submit, *, number: int, max_tokens: int, short_length: int = 0) -> None:
        self.submit = submit
        self.uid = submit.uid
        self.kind = submit.kind
        prompt = submit.prompt_token_ids
        self.token_ids = with_image_keys(prompt, submit.media) if submit.media else list(prompt)
        self.num_prompt = len(self.token_ids)
        if submit.continuation is not None:
            self.token_ids += submit.continuation.token_ids
        self.num_tokens = len(self.token_ids)
        self.num_computed = 0
        self.num_drafts = 0
        self.acceptance: Acceptance | None = None
        self.ngrams: NgramProposer | None = None
        self.drafts: list[int] = []
        self.expected_id = -1
        self.short_length = short_length
        self.max_tokens = max_tokens
        self.next_limit = min(max_tokens, short_length + 1) if self.num_tokens <= short_length else max_tokens
        self.is_long = 0 < short_length < self.num_tokens
        self.stop_ids = frozenset(submit.limits.stop_token_ids)
        self.state = State.WAITING
        self.order: tuple[float, ...] = (number,)
        self.running_order = (-submit.priority, number)
        self.allocation = NO_PAGES
        self.holds_last = False
        self.decodes = False
        self.has_forced = False
        self.gates: frozenset[Gate] = frozenset()
        self.waits_for: Node | None = None
        self.admitted_at: float | None = None
        self.num_cached = 0
        self.num_charged = 0
        self.num_preemptions = 0
        self.is_text_open = False

    @property
    def num_missing(self) -> int:
        """Positions to compute before the next token can be sampled; 0: a step in flight samples it."""
        return self.num_tokens - self.num_computed

    @property
    def salt(self) -> Salt:
        """Cache namespace. KV depends on the loaded adapter and on the RoPE factors, so both are part of it."""
        submit = self.submit
        if self.is_long:
            return (0 if submit.adapter is None else submit.adapter.id, submit.cache_salt, "long")
        return submit.cache_salt if submit.adapter is None else (submit.adapter.id, submit.cache_salt)

    @property
    def logprobs(self) -> LogprobRules | None:
        """The logprobs that it still needs. Prompt logprobs are complete with the first token."""
        rules = self.submit.logprobs
        if rules is None or rules.start < 0 or not self.is_text_open:
            return rules
        return replace(rules, start=-1)

    @property
    def ids_to_match(self) -> list[int]:
        """The tokens whose KV may come from the prefix cache, plus one. Positions with requested logprobs or hidden
        states must be computed, and so must the last position.
        """
        rules = self.logprobs
        if self.submit.sampling.hidden_states == ALL_STATES and not self.num_output:
            return self.token_ids[:1]
        return self.token_ids if rules is None or rules.start < 0 else self.token_ids[: max(rules.start, 1)]

    def ids_to_compute(self, start: int, end: int) -> list[int]:
        """Return the tokens at these positions as the model reads them, with image placeholders."""
        if not self.submit.media or start >= self.num_prompt:
            return self.token_ids[start:end]
        return self.submit.prompt_token_ids[start:end] + self.token_ids[self.num_prompt : end]

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    def start(self, allocation: Allocation, num_cached: int) -> None:
        """Start running with these pages. The first ``num_cached`` positions are computed."""
        self.allocation = allocation
        self.num_computed = num_cached
        self.state = State.RUNNING

    def stop(self, state: State) -> None:
        """Stop running: drop the pages (the caller frees them) and all tokens in flight."""
        self.allocation = NO_PAGES
        self.holds_last = False
        self.decodes = False
        self.has_forced = False
        self.num_computed = 0
        self.num_drafts = 0
        self.num_tokens = len(self.token_ids)
        self.is_long = 0 < self.short_length < self.num_tokens
        self.wait_for(None)
        self.state = state

    def count_forced(self) -> None:
        """Count new forced tokens. Rows in flight sample the first of them again and compute them."""
        if len(self.token_ids) > self.num_tokens:
            self.num_tokens = len(self.token_ids)
            self.holds_last = False
            self.decodes = False
            self.has_forced = True

    def wait_for(self, node: Node | None) -> None:
        """Wait until another request has computed the prefix up to ``node``. None: stop waiting."""
        self.waits_for = node
        if node is not None:
            self.close_gate(Gate.PREFIX)
        elif self.gates:
            self.open_gate(Gate.PREFIX)

    def close_gate(self, gate: Gate) -> None:
        self.gates |= {gate}
        self.decodes = False

    def open_gate(self, gate: Gate) -> None:
        self.gates -= {gate}
        self.decodes = self.holds_last and not self.gates


def end_of(request: Request) -> End | None:
    """Return the end of the request if its newest token ends it. A stop token has priority over the length.

    A stop token only ends the request after ``min_new_tokens`` output tokens. (The detokenizer finds stop strings.)
    """
    token_id = request.token_ids[-1]
    if token_id in request.stop_ids and request.num_output > request.submit.limits.min_new_tokens:
        return End(request.uid, FinishCode.STOP, token_id)
    if len(request.token_ids) >= request.max_tokens:
        return End(request.uid, FinishCode.LENGTH)
    return None


def refusal_of(submit: Submit, *, context_length: int, pool_tokens: int) -> End | None:
    """Return the end of a request whose prompt is too long."""
    num_prompt = len(submit.prompt_token_ids)
    min_tokens = num_prompt + 1 if submit.kind is RequestKind.GENERATE else num_prompt
    if min_tokens > context_length:
        limit, advice = f"{context_length} (the context)", "shorten it"
    elif min_tokens > pool_tokens:
        limit, advice = f"{pool_tokens} (the KV pool)", "shorten it or raise max_total_tokens"
    else:
        return None
    message = f"the prompt has {num_prompt} tokens; prompt and output together may have at most {limit}; {advice}"
    return End(submit.uid, FinishCode.TOO_LARGE, message=message)


def with_image_keys(token_ids: list[int], media: Sequence[Media]) -> list[int]:
    """Return the ids of a prompt for the prefix cache. Image positions have a negative id, the digest of the content.

    All positions of an image have the same placeholder id, whatever the image shows. With the digest, only equal images
    share pages. One id for all positions of an image is enough, because the digest also covers the number of positions.
    """
    ids = token_ids.copy()
    for image in media:
        key = -1 - int.from_bytes(image.content, "big")
        ids[image.start : image.start + image.num_tokens] = [key] * image.num_tokens
    return ids

"""Request: one prompt to continue or to pool, as the scheduler sees it, and when a token ends it.

It has ``num_tokens`` positions that are known or on their way and ``num_computed`` positions that have KV or will have
it by the steps launched so far. Scheduling lets the second number catch up with the first; a prompt, a chunk of it,
the rest after a prefix hit and a decode are the same thing.
"""

from __future__ import annotations

from copy import copy
from enum import Enum
from typing import TYPE_CHECKING

from msgspec.structs import replace

from aioengine.memory.prefix_cache import Allocation
from aioengine.protocol.messages import ALL_STATES, End, FinishCode, RequestKind
from aioengine.scheduler.gates import ALL_OPEN, Gate
from aioengine.scheduler.image_keys import with_image_keys

if TYPE_CHECKING:
    from aioengine.memory.radix import Node, Salt
    from aioengine.protocol.messages import Submit
    from aioengine.protocol.packed_logprobs import LogprobRules

NO_PAGES = Allocation()  # of a request that is not running; never changed


class State(Enum):
    """WAITING: in the queue, without pages. RUNNING: has pages for all its known positions. GATED: beside the queue,
    without pages, until its gates are open. ENDED: over.
    """

    WAITING = 0
    RUNNING = 1
    GATED = 2
    ENDED = 3


class History:
    """What happened to a request, for its ``TextOpened`` message and for its deadlines.

    num_charged: tokens that its tenant was charged for it. most_tokens: prompt and output together, in the end.
    """

    __slots__ = ("admitted_at", "is_text_open", "most_tokens", "num_cached", "num_charged", "num_preemptions")

    def __init__(self, most_tokens: int) -> None:
        self.most_tokens = most_tokens
        self.admitted_at: float | None = None
        self.num_cached = 0
        self.num_charged = 0
        self.num_preemptions = 0
        self.is_text_open = False


class Request:
    """One request, changed by ``Scheduler`` alone.

    order: its place in the queue (smaller is sooner), unique; set by the policy.
    rank: its place among the running requests, the last of whom is preempted first.
    max_tokens: prompt and output together, as far as it is computed in one way (see ``short_length``).
    token_ids: prompt and output, as far as known here; at images the ids by which the prefix cache knows them.
    holds_last: whether the runner holds the newest token, so that a row need not carry it.
    kind: POOL ends when its vector was given, SCORE with its logprobs; both never have output tokens.
    gates: the closed gates.
    decodes: whether its next row is a decode: the runner holds the newest token, and all gates are open.
    allocation: its pages, ``NO_PAGES`` while it is not running; a new one after each preemption and each ``rewind``,
        so a row of a plan is late when its request has another hold than at the launch.
    is_rewound: the runner gave another number of tokens than one, and the next rows compute what is missing.
    short_length: with more tokens its rotations are those of long texts, and then all of it is computed with them;
        until then, ``max_tokens`` is one more. 0: rotations do not depend on the length.
    waits_for: the last page of its prefix that another request is computing, or is going to take a snapshot of.
    """

    __slots__ = (
        "allocation",
        "decodes",
        "gates",
        "history",
        "holds_last",
        "is_rewound",
        "kind",
        "max_tokens",
        "num_computed",
        "num_prompt",
        "num_tokens",
        "order",
        "rank",
        "short_length",
        "state",
        "stop_ids",
        "submit",
        "token_ids",
        "uid",
        "waits_for",
    )

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
        self.short_length = short_length
        self.max_tokens = min(max_tokens, short_length + 1) if self.num_tokens <= short_length else max_tokens
        self.stop_ids = frozenset(submit.limits.stop_token_ids)
        self.state = State.WAITING
        self.order: tuple[float, ...] = (number,)
        self.rank = (-submit.priority, number)
        self.allocation = NO_PAGES
        self.holds_last = False
        self.decodes = False
        self.is_rewound = False
        self.gates = ALL_OPEN
        self.waits_for: Node | None = None
        self.history = History(max_tokens)

    @property
    def num_missing(self) -> int:
        """Positions to compute before the next token can be sampled (or is, by a step in flight: 0)."""
        return self.num_tokens - self.num_computed

    @property
    def is_long(self) -> bool:
        """Whether its rotations are those of long texts."""
        return 0 < self.short_length < len(self.token_ids)

    @property
    def salt(self) -> Salt:
        """Requests with another one share no prefix with it: of each load of an adapter the KV is another, and so it
        is with the rotations of long texts.
        """
        submit = self.submit
        if self.is_long:
            return (0 if submit.adapter is None else submit.adapter.id, submit.cache_salt, "long")
        return submit.cache_salt if submit.adapter is None else (submit.adapter.id, submit.cache_salt)

    @property
    def logprobs(self) -> LogprobRules | None:
        """The logprobs that it still needs: those of the prompt came with its first token."""
        rules = self.submit.logprobs
        if rules is None or rules.start < 0 or not self.history.is_text_open:
            return rules
        return replace(rules, start=-1)

    @property
    def ids_to_match(self) -> list[int]:
        """The tokens whose KV may come from the prefix cache, and one more: positions that give logprobs or hidden
        states are computed, and so is the last one.
        """
        rules = self.logprobs
        if self.submit.sampling.hidden_states == ALL_STATES and not self.num_output:
            return self.token_ids[:1]
        return self.token_ids if rules is None or rules.start < 0 else self.token_ids[: max(rules.start, 1)]

    def ids_to_compute(self, start: int, end: int) -> list[int]:
        """The tokens at these positions as the model reads them, with the placeholders of images."""
        if not self.submit.media or start >= self.num_prompt:
            return self.token_ids[start:end]
        return self.submit.prompt_token_ids[start:end] + self.token_ids[self.num_prompt : end]

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    def start(self, allocation: Allocation, num_cached: int) -> None:
        """Run with these pages, of which the first ``num_cached`` positions are computed."""
        self.allocation = allocation
        self.num_computed = num_cached
        self.state = State.RUNNING
        self.wait_for(None)

    def stop(self, state: State) -> None:
        """Stop running: drop the pages (the caller frees them) and all tokens that are still in flight."""
        self.allocation = NO_PAGES
        self.holds_last = False
        self.decodes = False
        self.is_rewound = False
        self.num_computed = 0
        self.num_tokens = len(self.token_ids)
        self.wait_for(None)
        self.state = state

    def rewind(self, num_computed: int) -> None:
        """A row up to ``num_computed`` gave none or several tokens, where one was planned for: later rows are late.

        Without a token the last position is computed again, for its logits.
        """
        self.allocation = copy(self.allocation)
        self.num_tokens = len(self.token_ids)
        self.num_computed = min(num_computed, self.num_tokens - 1)
        self.holds_last = False
        self.decodes = False
        self.is_rewound = True

    def wait_for(self, node: Node | None) -> None:
        """Wait for the prefix up to ``node``, which another request is computing; None: for no prefix."""
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
    """The end of the request if its newest token ends it. A stop token beats the length on the same token.

    A stop token acts when at least ``min_new_tokens`` output tokens stand before it. (Stop strings are found in the
    detokenizer.)
    """
    token_id = request.token_ids[-1]
    if token_id in request.stop_ids and request.num_output > request.submit.limits.min_new_tokens:
        return End(request.uid, FinishCode.STOP, token_id)
    if len(request.token_ids) >= request.history.most_tokens:
        return End(request.uid, FinishCode.LENGTH)
    return None


def num_wanted(submit: Submit) -> int:
    """The most tokens that a request asks for, prompt and output together."""
    num_output = submit.limits.max_new_tokens if submit.kind is RequestKind.GENERATE else 0
    return len(submit.prompt_token_ids) + num_output


def refusal_of(submit: Submit, *, context_length: int, pool_tokens: int) -> End | None:
    """The end of a request that ends before it begins: its prompt is empty or too long, or it wants no output."""
    uid, num_prompt = submit.uid, len(submit.prompt_token_ids)
    if num_prompt == 0:
        return End(uid, FinishCode.FAILED, stage="schedule", message="the prompt has no tokens; give at least one")
    generates = submit.kind is RequestKind.GENERATE
    if submit.limits.max_new_tokens <= 0 and generates:
        return End(uid, FinishCode.LENGTH)
    least = num_prompt + 1 if generates else num_prompt
    if least > context_length:
        limit, advice = f"the context holds {context_length}", "shorten it"
    elif least > pool_tokens:
        limit, advice = f"the KV pool holds {pool_tokens}", "shorten it or raise max_total_tokens"
    else:
        return None
    message = f"the prompt has {num_prompt} tokens, {limit} with the output; {advice}"
    return End(uid, FinishCode.TOO_LARGE, message=message)

"""The messages between processes.

    frontend --> scheduler      Submit, Abort, Suspend, Resume, Control, NewEpoch
    scheduler --> other ranks   RankStep              one per step; RankAdapter, Control, NewEpoch
    scheduler --> detokenizer   StepOutput            one per step, for all requests
    detokenizer --> scheduler   Abort (at a stop string, or after an error)
    detokenizer --> frontend    TextChunks            one per StepOutput with news; more for queued stop patterns
    scheduler --> frontend      Stats, Reply, TextChunks (vectors, scores, compiled grammars)
    all children --> frontend   Ready, Failed, Progress, LogRecord

Messages are sent in a ``Frame``, with the epoch of the child process that sends or receives it. Times are absolute
seconds of this machine's ``CLOCK_MONOTONIC`` (see ``Frame.sent_at``). Data with one entry per token is in columns
(lists of equal length). Rare events are lists of Structs.
"""

from __future__ import annotations

from enum import IntEnum

from msgspec import Struct, field

from aioengine.protocol.columns import POOLED_VECTOR, Extra, TokenColumns
from aioengine.protocol.packed_logprobs import NEXT_LOGPROBS, LogprobRules
from aioengine.protocol.rank_step import RankAdapter, RankStep


class Role(Struct, frozen=True, array_like=True, gc=False):
    """A child process of a replica: its task, and its rank among the children with the same task."""

    name: str
    rank: int = 0

    def __str__(self) -> str:
        return f"{self.name}-{self.rank}" if self.rank else self.name


SCHEDULER = Role("scheduler")
DETOKENIZER = Role("detokenizer")
RUNNER = "runner"
"""The name of the roles of ranks above 0."""


class FinishCode(IntEnum):
    """Why a request ended. ``answers`` converts these codes to the public finish reasons."""

    STOP = 0  # at the stop token, stop string or stop pattern ``matched``; POOL: the vector was returned
    LENGTH = 1
    ABORT = 2
    DEADLINE = 3  # ``matched`` is "total", "queue" or "first_token"
    SHUTDOWN = 4
    TOO_LARGE = 5  # refused: it never fits; raised as RequestTooLargeError
    FAILED = 6  # an error of this request, with ``stage`` and ``message``; raised as RequestError
    REFUSED = 7  # it would miss its deadline by ``matched`` milliseconds; raised as EngineOverloadedError
    UNSUPPORTED = 8  # its grammar cannot be enforced, ``matched`` at ``stage``; raised as UnsupportedSchemaError


class RequestKind(IntEnum):
    """The result of a request."""

    GENERATE = 0  # tokens, until a stop or a limit
    POOL = 1  # one vector for the prompt; ends with STOP; ``max_new_tokens`` does not apply
    SCORE = 2  # logprobs of the prompt and of the next token, but no token; ends with LENGTH


# ---------------------------------------------------------------- the parts of a request


SEED_MASK = 2**63 - 1
"""The bits of a seed."""

GREEDY_BELOW = 1e-5
"""Sampling is greedy below this temperature, because logits divided by a smaller number could overflow."""


LAST_STATES = "last"
ALL_STATES = "all"
"""Values of ``Sampling.hidden_states``."""


class Grammar(Struct, frozen=True, array_like=True, gc=False):
    """The constraint of structured output.

    kind: "json" (``text`` is a grammar in llguidance's JSON form), "regex" (for the whole output), "lark", or "ebnf"
        (GBNF or Lark).
    eos_token_ids: end-of-text tokens. They are allowed where the grammar may end; with ``ignore_eos``, only if no other
        token is allowed.
    reasoning_end: the constraint begins after this text or these token ids; empty: at the first output token.
    max_thinking_tokens: maximum number of tokens before ``reasoning_end``, which is then forced.
    parameter: name and shortened value of the sampling parameter, for errors.
    """

    kind: str
    text: str
    ignore_eos: bool = False
    reasoning_end: str | tuple[int, ...] = ""
    max_thinking_tokens: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    parameter: str = ""


class Sampling(Struct, frozen=True, array_like=True, gc=False):
    """How the runner samples the next token.

    seed: within ``SEED_MASK``. top_k: -1: off. logit_bias: one value for each of ``bias_token_ids``.
    suppressed_token_ids: not sampled before ``min_new_tokens`` output tokens (the stop tokens).
    allowed_token_ids: if not empty, only these are sampled. bad_token_ids: sequences; the last id of a sequence is not
    sampled after the other ids. custom_processor: name of a custom logits processor. custom_params: its parameters as
    JSON. hidden_states: LAST_STATES (one per token, of the position from which it was sampled), ALL_STATES (also of the
    prompt, with the first token), or empty (none).
    """

    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    bias_token_ids: tuple[int, ...] = ()
    logit_bias: tuple[float, ...] = ()
    min_new_tokens: int = 0
    suppressed_token_ids: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    custom_processor: str = ""
    custom_params: bytes = b""
    hidden_states: str = ""
    grammar: Grammar | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        return bool(self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1.0)


class Limits(Struct, frozen=True, array_like=True, gc=False):
    """The limits of a request, enforced by the scheduler.

    stop_token_ids: includes the end-of-text ids of the model, unless ``ignore_eos``. They end the request only after
    ``min_new_tokens`` output tokens. deadlines: absolute times, by their names in a finish reason ("total", "queue",
    "first_token"). refuses_late: end the request immediately if it will surely miss a deadline.
    """

    max_new_tokens: int
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    deadlines: dict[str, float] = {}
    refuses_late: bool = False


class TextRules(Struct, frozen=True, array_like=True, gc=False):
    """How the detokenizer decodes the output.

    context_token_ids: the last ids of the prompt, as context of the first output token. stream_interval: tokens per
    chunk; without ``stream``, chunks have many tokens. no_stop_trim: the text includes the stop token or stop string
    that ends the request. logprobs: if not None, the detokenizer adds texts to these logprobs.
    """

    context_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    stream: bool = True
    stream_interval: int = 1
    logprobs: LogprobRules | None = None


class PairIds(list[int]):
    """The ids of a text or of a pair of texts. ``second_text``: as in ``Submit``."""

    second_text = 0


# ---------------------------------------------------------------- to the scheduler


DEFAULT_WEIGHT_VERSION = "default"


class FirstToken(Struct, frozen=True, array_like=True, gc=False):
    """A request has its first token.

    num_cached: prompt tokens taken from the prefix cache. weight_version: of this token. replica: added by a fleet.
    """

    uid: int
    num_cached: int
    admitted_at: float
    first_token_at: float
    weight_version: str = DEFAULT_WEIGHT_VERSION
    replica: int | None = None


class Continuation(Struct, frozen=True, array_like=True, gc=False):
    """The state of a request before its processes were replaced: its first token, its delivered output ids, and its
    number of preemptions.

    Everything else is a function of these: the next token depends on seed and position, the text on the ids.
    """

    first_token: FirstToken
    token_ids: list[int]
    num_preemptions: int = 0


class Adapter(Struct, frozen=True, array_like=True, gc=False):
    """A loaded LoRA adapter.

    id: from 1, unique in the engine; each load has a new id, even of the same name.
    path: the absolute path of its folder, or, with ``config``, of a file with its tensors. fingerprint: of the files at
    the load. If they have changed, the adapter is refused. is_pinned: it keeps its slot. config: its config as JSON.
    """

    id: int
    name: str
    path: str
    fingerprint: str
    is_pinned: bool = False
    config: str = ""


class Media(Struct, frozen=True, array_like=True, gc=False):
    """An image of a prompt. The token ids of the prompt include its placeholders.

    start: its first position in the prompt. num_tokens: number of its positions.
    num_features: number of its positions with the placeholder id, which get features. The other positions (markers of
        tiles, for example) are computed as text.
    content: sha256 digest of the source bytes and the image processing. Images with equal content have equal features.
    grid: (frames, height, width) in patches; zeros for families without grids.
    path: a safetensors file with the arguments of ``VisionModel.encode_image``. It exists as long as the request.
    data: the content of this file, for a scheduler on another machine.
    """

    start: int
    num_tokens: int
    num_features: int
    content: bytes
    path: str
    grid: tuple[int, int, int] = (0, 0, 0)
    data: bytes = b""


class Submit(Struct, tag="submit", array_like=True, gc=False):
    """A new request.

    uid: unique in the engine. priority: requests with higher values run first.
    continuation: the request continues after its processes were replaced. Its limits still count from the prompt on.
    tenant: the tenant whose share it uses. cache_salt: requests with different salts share no cached prefixes.
    logprobs: the logprobs that it wants.
    embeds: embeddings [tokens, D] fp32 of the prompt. The prompt ids are then ignored.
    session: its pages stay pinned after its end until the control call "close_sessions"; 0: no session.
    second_text: index of the first token of the second text, in the prompt of a POOL request; 0: there is none.
    adapter: its adapter; None: the base model. Requests with the same ``Adapter.id`` can share prefixes.
    media: the images of the prompt, in order. replica: chosen by the caller; None: ``Routes`` chooses.
    """

    uid: int
    prompt_token_ids: list[int]
    sampling: Sampling
    limits: Limits
    text: TextRules
    priority: int = 0
    arrived_at: float = 0.0
    continuation: Continuation | None = None
    tenant: str = ""
    kind: RequestKind = RequestKind.GENERATE
    cache_salt: str = ""
    logprobs: LogprobRules | None = None
    session: int = 0
    second_text: int = 0
    embeds: bytes = b""
    adapter: Adapter | None = None
    media: list[Media] = []
    replica: int | None = None


class Abort(Struct, tag="abort", array_like=True, gc=False):
    """End these requests. Ignores unknown uids: these requests have just ended.

    The detokenizer sends code STOP for each request that it has ended, and reports the end to the frontend itself. So
    the scheduler sends no ``End`` for STOP. For other codes, it sends one ``End`` per request.
    """

    uids: list[int]
    code: FinishCode = FinishCode.ABORT
    message: str = ""


class Suspend(Struct, tag="suspend", array_like=True, gc=False):
    """Pause these requests until ``Resume``. They keep their tokens. Ignores unknown uids."""

    uids: list[int]


class Resume(Struct, tag="resume", array_like=True, gc=False):
    """Continue these suspended requests. Ignores unknown uids."""

    uids: list[int]


LOAD_ADAPTER = "load_adapter"
UNLOAD_ADAPTER = "unload_adapter"
"""Names of control calls. Their arguments are the fields of an ``Adapter``."""

Argument = str | int | float | bool | list[str] | None
MAX_REPLY_BYTES = 32 * 1024 * 1024
"""Limit for the data of one ``Reply``, so that it fits into a frame and is sent quickly."""

MAX_PART_BYTES = 256 * 1024
"""Limit for the extras of one ``StepOutput``, so that reading them does not block the event loop of the caller."""


class Control(Struct, tag="control", array_like=True, gc=False):
    """A control call to the scheduler process, answered by one ``Reply`` with the same ``call_id``.

    ``name``: "flush_cache", "close_sessions", "pause", "continue", "server_info", "freeze_gc", "start_profile",
    "stop_profile", "load_adapter", "unload_adapter", or a name of ``Runner.controls``, which runs between two steps
    when no step is in flight. ``arguments``: keyword arguments; large data goes through a file, whose path is one.
    """

    call_id: int
    name: str
    arguments: dict[str, Argument] = {}


class NewEpoch(Struct, tag="new_epoch", array_like=True, gc=False):
    """The detokenizer was replaced. Forget all requests; they are sent again. The answer is ``Ready``.

    All later frames in all channels have the new ``epoch``. Older frames are dropped.
    """

    epoch: int


# ---------------------------------------------------------------- scheduler to detokenizer


class TextOpened(Struct, array_like=True, gc=False):
    """A request has its first token, or continues after ``known_ids``, which were delivered before.

    num_preemptions: number of preemptions before it continued.
    """

    first_token: FirstToken
    text: TextRules
    known_ids: list[int] = []
    num_preemptions: int = 0


class End(Struct, array_like=True, gc=False):
    """The end of a request, with values for its ``meta_info``. ``complete`` sets the fields after ``message``.

    The time of an event that did not happen is None. A request may end before its first token.
    """

    uid: int
    code: FinishCode
    matched: int | str | None = None
    stage: str = ""
    message: str = ""
    num_cached: int = 0
    num_preemptions: int = 0
    admitted_at: float | None = None
    first_token_at: float | None = None
    ended_at: float = 0.0

    def complete(self, first_token: FirstToken, num_preemptions: int, now: float) -> End:
        """Set the fields after ``message``. Return self."""
        self.num_cached, self.num_preemptions = first_token.num_cached, num_preemptions
        self.admitted_at, self.first_token_at = first_token.admitted_at, first_token.first_token_at
        self.ended_at = now
        return self


class StepOutput(Struct, tag="step_output", array_like=True, gc=False):
    """The sampled tokens of one step, and the events since the previous step.

    Read them in this order: ``opened``, ``tokens``, ``preempted``, ``ended``. An empty output is a heartbeat.
    """

    tokens: TokenColumns = field(default_factory=TokenColumns)
    opened: list[TextOpened] = []
    preempted: list[int] = []
    ended: list[End] = []

    @property
    def has_news(self) -> bool:
        """Whether it is more than a heartbeat."""
        return bool(self.tokens.uids or self.tokens.extras or self.opened or self.preempted or self.ended)

    def take_textless(self) -> TextChunks | None:
        """Remove and return the requests that end with a vector or a distribution: they need no detokenizer.

        The complete result of such a request is in one output.
        """
        if not self.opened:
            return None
        openings = {opened.first_token.uid: opened for opened in self.opened if opened.text.logprobs is None}
        complete = {extra.uid for extra in self.tokens.extras if extra.kind in (POOLED_VECTOR, NEXT_LOGPROBS)}
        taken = {end.uid: end for end in self.ended if end.uid in complete and end.uid in openings}
        if not taken:
            return None
        chunks = TextChunks(preempted=[uid for uid in self.preempted if uid in taken])
        for uid, end in taken.items():
            first_token = openings[uid].first_token
            chunks.first_tokens.append(first_token)
            chunks.ended.append(end.complete(first_token, chunks.preempted.count(uid), first_token.first_token_at))
        chunks.tokens.extras += (extra for extra in self.tokens.extras if extra.uid in taken)
        self.tokens = self.tokens.limited(dict.fromkeys(taken, 0))
        self.opened = [opened for opened in self.opened if opened.first_token.uid not in taken]
        self.preempted = [uid for uid in self.preempted if uid not in taken]
        self.ended = [end for end in self.ended if end.uid not in taken]
        return chunks

    def parts(self, max_bytes: int = MAX_PART_BYTES) -> list[StepOutput]:
        """Return self, or several outputs with at most ``max_bytes`` of extras. A single extra may be larger.

        A request is opened with its first extra. Its tokens and its end come with its last extra.
        """
        tokens = self.tokens
        if sum(len(extra.data) for extra in tokens.extras) <= max_bytes:
            return [self]
        extras: dict[int, list[Extra]] = {uid: [] for uid in tokens.uids}
        for extra in tokens.extras:
            extras.setdefault(extra.uid, []).append(extra)
        parts = [StepOutput()]
        opening_of: dict[int, StepOutput] = {}
        part_of: dict[int, StepOutput] = {}
        left = max_bytes

        def part_for(size: int) -> StepOutput:
            nonlocal left
            if size > left and left < max_bytes:
                parts.append(StepOutput())
                left = max_bytes
            return parts[-1]

        for uid, own in extras.items():
            opening_of[uid] = part_of[uid] = part_for(sum(len(extra.data) for extra in own))
            for extra in own:
                part_of[uid] = part_for(len(extra.data))
                part_of[uid].tokens.extras.append(extra)
                left -= len(extra.data)
        for uid, new in zip(tokens.uids, tokens.rows(), strict=True):
            part_of[uid].tokens.add(uid, [new] if isinstance(new, int) else new)
        for opened in self.opened:
            opening_of.get(opened.first_token.uid, parts[0]).opened.append(opened)
        for uid in self.preempted:
            part_of.get(uid, parts[-1]).preempted.append(uid)
        for end in self.ended:
            part_of.get(end.uid, parts[-1]).ended.append(end)
        return parts


# ---------------------------------------------------------------- to the frontend


class TextChunks(Struct, tag="text_chunks", array_like=True, gc=False):
    """New tokens and their text: ``texts[i]`` belongs to ``tokens.uids[i]``. The same uid may occur several times.

    A request may be in ``tokens`` and in ``ended``; its tokens come first.
    num_open: number of open requests in the detokenizer; None: the scheduler sent this message.
    first_tokens: of requests that now have a first token, even if its text is held back.
    preempted: uids of preempted requests, once for each preemption.
    compiled: uids of streams whose grammar is compiled; sent by the scheduler.
    """

    tokens: TokenColumns = field(default_factory=TokenColumns)
    texts: list[str] = []
    ended: list[End] = []
    num_open: int | None = None
    first_tokens: list[FirstToken] = []
    preempted: list[int] = []
    compiled: list[int] = []

    @property
    def has_news(self) -> bool:
        """Whether it is more than a heartbeat."""
        return bool(
            self.texts or self.tokens.extras or self.ended or self.first_tokens or self.preempted or self.compiled
        )


class Totals(Struct, array_like=True, gc=False):
    """Counters of the scheduler that only grow."""

    num_preemptions: int = 0
    num_steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_proposed_drafts: int = 0
    num_accepted_drafts: int = 0


class Stats(Totals, tag="stats", array_like=True, gc=False):
    """Totals and current counts of the scheduler.

    Sent up to ten times per second while requests run, once when the scheduler becomes idle, and as a heartbeat.
    num_free_pages: free pages and cached pages that no request uses. num_pinned_pages: pages that are pinned by
    sessions and not used by a request. step_ended_at: time of the last step; 0: there was none.
    """

    sent_at: float = 0.0
    step_ended_at: float = 0.0
    num_running: int = 0
    num_waiting: int = 0
    num_pages: int = 0
    num_free_pages: int = 0
    num_cached_pages: int = 0
    num_pinned_pages: int = 0


class Reply(Struct, tag="reply", array_like=True, gc=False):
    """The answer to a ``Control``. data: JSON text, or empty.

    stage: "crash" (its process ended) or "control" (the runner raised an exception): the reply is raised as
    RequestError. Empty after a success or a refusal.
    """

    call_id: int
    success: bool
    message: str = ""
    data: str = ""
    stage: str = ""


Fact = str | int | float | bool
"""A value of ``Ready.facts``."""


class Ready(Struct, tag="ready", array_like=True, gc=False):
    """A child process is ready. fingerprint: of its protocol. facts: JSON text about its device and model.

    The facts of the scheduler have at least ``num_pages``, ``page_size``, ``max_total_tokens``, ``dtype``, ``device``,
    ``attention_backend``, ``weights_bytes`` (as loaded, before layers convert them), ``kv_pool_bytes`` and
    ``load_s``.
    """

    role: Role
    pid: int
    fingerprint: str
    facts: str = "{}"


class Failed(Struct, tag="failed", array_like=True, gc=False):
    """A child process could not start, or its loop raised an exception. It exits after this message."""

    role: Role
    error_type: str
    message: str
    traceback: str = ""


class Progress(Struct, tag="progress", array_like=True, gc=False):
    """Progress of slow work in a child process: ``done`` of ``total`` units. The frontend shows a progress bar."""

    label: str
    done: int
    total: int
    unit: str = "it"


class LogRecord(Struct, tag="log", array_like=True, gc=False):
    """A record of an ``aioengine.*`` logger in a child process. The same logger in the frontend handles it."""

    logger: str
    level: int
    message: str


ToScheduler = Submit | Abort | Suspend | Resume | Control
ToDetokenizer = StepOutput
ToFrontend = TextChunks | Stats | Reply | Ready | Failed | Progress | LogRecord
Message = ToScheduler | NewEpoch | RankStep | RankAdapter | ToDetokenizer | ToFrontend


class Frame(Struct, array_like=True, gc=False):
    """The messages that are sent together. A receiver drops frames of other epochs.

    sender: a random number for each sender. number: the number of earlier frames of this sender, so that a missing
    frame is noticed. sent_at: set between machines, so that the receiver can convert times to its clock.
    """

    epoch: int
    sender: int
    number: int
    messages: list[Message]
    sent_at: float | None = None

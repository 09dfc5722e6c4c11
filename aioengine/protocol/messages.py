"""Every message that crosses a process border.

    frontend --> scheduler      Submit, Abort, Suspend, Resume, Control, NewEpoch
    scheduler --> detokenizer   StepOutput            one for each step, whatever the number of requests
    detokenizer --> scheduler   Abort (a stop string was found, or the text stage failed)
    detokenizer --> frontend    TextChunks            one for each StepOutput
    scheduler --> frontend      Stats, Reply, TextChunks (vectors, scores, and which grammars are compiled)
    both children --> frontend  Ready, Failed, Progress, LogRecord

A frame is a ``Frame``: the epoch of the child that it comes from (or goes to) and the messages, in order. Times are
absolute seconds of ``CLOCK_MONOTONIC``, which all processes of one machine share. Columns (lists of equal length)
stand where there is one entry for each token of a step; rare events are lists of Structs.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

from msgspec import Struct, field

from aioengine.protocol.columns import POOLED_VECTOR, BadColumnsError, Extra, TokenColumns
from aioengine.protocol.packed_logprobs import NEXT_LOGPROBS, LogprobRules

if TYPE_CHECKING:
    from collections.abc import Iterable


class Role(Struct, frozen=True, array_like=True, gc=False):
    """A child process of a replica: its task, and its rank among the children with the same task."""

    name: str
    rank: int = 0

    def __str__(self) -> str:
        return f"{self.name}-{self.rank}" if self.rank else self.name


SCHEDULER = Role("scheduler")
DETOKENIZER = Role("detokenizer")


class FinishCode(IntEnum):
    """Why a request ended; the public words are made of these in ``answers``."""

    STOP = 0  # by the stop token, stop string or stop pattern ``matched``; or the vector of POOL was given
    LENGTH = 1
    ABORT = 2
    DEADLINE = 3  # ``matched`` is "total", "queue" or "first_token"
    SHUTDOWN = 4
    TOO_LARGE = 5  # refused: can never fit; raised as RequestTooLargeError
    FAILED = 6  # this request alone failed; ``stage`` and ``message``; raised as RequestError
    REFUSED = 7  # it would miss its deadline; ``matched``: by how many milliseconds; raised as EngineOverloadedError
    UNSUPPORTED = 8  # its grammar cannot be enforced, ``matched`` at ``stage``; raised as UnsupportedSchemaError


class RequestKind(IntEnum):
    """What a request asks for."""

    GENERATE = 0  # tokens, until a stop or a limit
    POOL = 1  # one vector for its whole prompt, which ends it with STOP; ``max_new_tokens`` does not apply
    SCORE = 2  # logprobs of its prompt and of what may come next, which end it with LENGTH; it gives no token


# ---------------------------------------------------------------- the parts of a request


SEED_MASK = 2**63 - 1
"""The bits of a seed."""

GREEDY_BELOW = 1e-5
"""A temperature below this means the likeliest token: divided by less, logits could overflow."""


LAST_STATES = "last"
ALL_STATES = "all"
"""Values of ``Sampling.hidden_states``."""


class Grammar(Struct, frozen=True, array_like=True, gc=False):
    """What the output of a request must match.

    kind: "json" (``text`` is a grammar in llguidance's JSON form), "regex" (for the whole output), "lark", or "ebnf"
        (GBNF or Lark).
    eos_token_ids: the ends of the text, which are allowed where the grammar may end; with ``ignore_eos`` only where no
        other token is.
    reasoning_end: text or token ids behind which the constraint begins; empty: at once. ``max_thinking_tokens``: tokens
        before it at most; then it is forced.
    parameter: the name and value from which it was made, cut to a readable length, for errors.
    """

    kind: str
    text: str
    ignore_eos: bool = False
    reasoning_end: str | tuple[int, ...] = ""
    max_thinking_tokens: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    parameter: str = ""


class Sampling(Struct, frozen=True, array_like=True, gc=False):
    """How the next token is drawn; the runner's part of a request.

    ``seed`` is within ``SEED_MASK``. ``top_k`` -1 is off. ``logit_bias`` is parallel to ``bias_token_ids``.
    ``suppressed_token_ids`` cannot be drawn before ``min_new_tokens`` output tokens exist (the stop tokens).
    ``allowed_token_ids`` alone can be drawn, where there are any. The last id of each of ``bad_token_ids`` cannot be
    drawn behind the others. ``custom_processor``: the name of a logits processor of the user; ``custom_params``: its
    parameters, in JSON. ``hidden_states``: those that come with tokens: LAST_STATES (of the position that gave each) or
    ALL_STATES (and of the prompt, before the first token); empty: none.
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
    """When a request ends or is given up; the scheduler's part of a request.

    ``stop_token_ids`` holds the model's end-of-text ids too, unless ``ignore_eos``. They do not act before
    ``min_new_tokens`` output tokens. Deadlines are absolute times or None. ``refuses_late``: a request that will
    surely miss one of them is ended at once.
    """

    max_new_tokens: int
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    deadline: float | None = None
    queue_deadline: float | None = None
    first_token_deadline: float | None = None
    refuses_late: bool = False

    def deadlines(self) -> dict[str, float]:
        """The deadlines that are set, by the words that name them in a finish reason."""
        times = {"total": self.deadline, "queue": self.queue_deadline, "first_token": self.first_token_deadline}
        return {which: time for which, time in times.items() if time is not None}


class TextRules(Struct, frozen=True, array_like=True, gc=False):
    """How ids become text; the detokenizer's part of a request.

    ``context_token_ids`` are the last few ids of the prompt, so that the first output token is decoded in its
    place. ``stream_interval`` is in tokens; without ``stream`` text leaves in pieces of many tokens.
    The stop that ends the request, a token or a text, is not part of its text unless ``no_stop_trim``.
    ``logprobs``: where texts are to be appended to them.
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
    """The ids of a text, or of a pair of texts, which some models tell apart. ``second_text``: as in ``Submit``."""

    second_text = 0


# ---------------------------------------------------------------- to the scheduler


DEFAULT_WEIGHT_VERSION = "default"


class FirstToken(Struct, frozen=True, array_like=True, gc=False):
    """A request has its first token.

    num_cached: number of prompt tokens taken from the prefix cache. weight_version: version of the model's weights.
    """

    uid: int
    num_cached: int
    admitted_at: float
    first_token_at: float
    weight_version: str = DEFAULT_WEIGHT_VERSION


class Continuation(Struct, frozen=True, array_like=True, gc=False):
    """The state of a request before its processes were replaced: its first token, its output ids, all of them
    delivered, and how often it had been preempted.

    The rest is a function of these: the next token of (seed, position), the text held back of the ids.
    """

    first_token: FirstToken
    token_ids: list[int]
    num_preemptions: int = 0


class Adapter(Struct, frozen=True, array_like=True, gc=False):
    """A LoRA adapter that requests may use: all that is needed to read it, again too.

    id: from 1, unique for the life of the engine; each load has its own, also of a name that was loaded before.
    path: its folder, absolute. fingerprint: of the folder's files when it was loaded; a folder that has changed since
    is refused. is_pinned: it keeps its place on the device.
    """

    id: int
    name: str
    path: str
    fingerprint: str
    is_pinned: bool = False


class Media(Struct, frozen=True, array_like=True, gc=False):
    """One image of a prompt, whose placeholders are in place in the token ids.

    start: the first of its positions in the prompt. num_tokens: all positions from there on that belong to it.
    num_features: those of them that get features, which are those that hold the placeholder's id; the others (markers
        of tiles, for example) are computed as text.
    content: a sha256 digest of the source bytes and of all that makes pixels of them: equal content, equal features.
    grid: (frames, height, width) in patches, for families that have grids; else zeros.
    path: a safetensors file with the arrays that ``VisionModel.encode_image`` takes. It lasts as long as the request.
    """

    start: int
    num_tokens: int
    num_features: int
    content: bytes
    path: str
    grid: tuple[int, int, int] = (0, 0, 0)


class Submit(Struct, tag="submit", array_like=True, gc=False):
    """A new request. ``uid`` is unique for the life of the engine; ``priority``: higher runs sooner.

    ``continuation``: it goes on where it was when its processes died; its limits still count from the prompt on.
    ``tenant``: whose share of the engine it uses. ``cache_salt``: it shares cached prefixes with no other salt.
    ``logprobs``: those that it wants.
    ``embeds``: the embeddings of the prompt, [tokens, D] fp32, in place of those of its ids, which then mean nothing.
    ``session``: keep its pages, once it is answered, until the control "close_sessions"; 0: it belongs to none.
    ``second_text``: where the second text of a pair begins in the prompt of a POOL request; 0: there is none.
    ``adapter``: the one that it uses; None: the base model. Prefixes are shared among requests of one load of it.
    ``media``: the images of the prompt, in its order.
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


class Abort(Struct, tag="abort", array_like=True, gc=False):
    """End these requests. Unknown uids are ignored, they have just ended by themselves.

    STOP comes from the detokenizer, which has already reported the end to the frontend: the scheduler frees the request
    and sends nothing. For every other code it answers with one ``End``.
    """

    uids: list[int]
    code: FinishCode = FinishCode.ABORT
    message: str = ""


class Suspend(Struct, tag="suspend", array_like=True, gc=False):
    """Compute nothing more of these requests until ``Resume``; they lose nothing. Unknown uids are ignored."""

    uids: list[int]


class Resume(Struct, tag="resume", array_like=True, gc=False):
    """Continue these suspended requests. Unknown uids are ignored."""

    uids: list[int]


LOAD_ADAPTER = "load_adapter"
UNLOAD_ADAPTER = "unload_adapter"
"""Controls, whose arguments are the fields of an ``Adapter``."""

Argument = str | int | float | bool | list[str] | None
MAX_PAYLOAD_BYTES = 32 * 1024 * 1024
"""Of one ``Control`` or ``Reply``: it fits into a frame, and a process waits for its reader only briefly."""

MAX_PART_BYTES = 2 * 1024 * 1024
"""Of the extras of one ``StepOutput``: those of several are read in several turns of the caller's loop."""


class Control(Struct, tag="control", array_like=True, gc=False):
    """A control call to the scheduler process, answered by one ``Reply`` with the same ``call_id``.

    ``name``: "flush_cache", "close_sessions", "pause", "continue", "server_info", "freeze_gc", "start_profile",
    "stop_profile", "load_adapter", "unload_adapter", or a name of ``Runner.controls``, which runs between two steps
    when no step is in flight. ``arguments``: keyword arguments; paths of files are among them. ``payload``: bytes for
    the call, up to ``MAX_PAYLOAD_BYTES``; larger data goes through a file.
    """

    call_id: int
    name: str
    arguments: dict[str, Argument] = {}
    payload: bytes = b""


class NewEpoch(Struct, tag="new_epoch", array_like=True, gc=False):
    """The detokenizer is replaced: forget all requests, they come again. Answered by ``Ready``.

    All frames that follow, in all channels, are of ``epoch``; those that were on their way are dropped.
    """

    epoch: int


# ---------------------------------------------------------------- scheduler to detokenizer


class TextOpened(Struct, array_like=True, gc=False):
    """A request has its first token in this step, or goes on behind ``known_ids``, which were delivered before.

    ``num_preemptions``: those before it went on.
    """

    first_token: FirstToken
    text: TextRules
    known_ids: list[int] = []
    num_preemptions: int = 0


class End(Struct, array_like=True, gc=False):
    """The end of a request: why, and what its ``meta_info`` needs. ``complete`` fills in what follows ``message``.

    Times are None for what was never reached. In a ``StepOutput`` it comes after the tokens of the request, whose text
    may never have been opened.
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
        """Fill in what follows ``message``."""
        self.num_cached, self.num_preemptions = first_token.num_cached, num_preemptions
        self.admitted_at, self.first_token_at = first_token.admitted_at, first_token.first_token_at
        self.ended_at = now
        return self


class StepOutput(Struct, tag="step_output", array_like=True, gc=False):
    """The sampled tokens of one step, and the events since the step before.

    Order of reading: ``opened``, then ``tokens``, then ``preempted``, then ``ended``. An empty one is a heartbeat.
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
        """Take out the requests that a vector or a distribution answers: they need no detokenizer.

        All of such a request is in one output.
        """
        if not (self.opened and self.tokens.extras):
            return None
        opened = {one.first_token.uid: one for one in self.opened if one.text.logprobs is None}
        given = {extra.uid for extra in self.tokens.extras if extra.kind in (POOLED_VECTOR, NEXT_LOGPROBS)}
        taken = {end.uid: end for end in self.ended if end.uid in given and end.uid in opened}
        if not taken:
            return None
        chunks = TextChunks(preempted=[uid for uid in self.preempted if uid in taken])
        for uid, end in taken.items():
            first_token = opened[uid].first_token
            chunks.first_tokens.append(first_token)
            chunks.ended.append(end.complete(first_token, chunks.preempted.count(uid), first_token.first_token_at))
        chunks.tokens.extras += (extra for extra in self.tokens.extras if extra.uid in taken)
        self.tokens = self.tokens.limited(dict.fromkeys(taken, 0))
        self.opened = [one for one in self.opened if one.first_token.uid not in taken]
        self.preempted = [uid for uid in self.preempted if uid not in taken]
        self.ended = [end for end in self.ended if end.uid not in taken]
        return chunks

    def parts(self, max_bytes: int = MAX_PART_BYTES) -> list[StepOutput]:
        """Itself, or where its extras are larger than ``max_bytes`` several that are not, unless a single one is.

        The tokens and the end of a request come with the last of its extras, its opening with the first.
        """
        tokens = self.tokens
        if not tokens.extras or sum(len(extra.data) for extra in tokens.extras) <= max_bytes:
            return [self]
        extras: dict[int, list[Extra]] = {uid: [] for uid in tokens.uids}
        for extra in tokens.extras:
            extras.setdefault(extra.uid, []).append(extra)
        found = [StepOutput()]
        opening_of: dict[int, StepOutput] = {}
        part_of: dict[int, StepOutput] = {}
        room = max_bytes

        def part_for(size: int) -> StepOutput:
            nonlocal room
            if size > room and room < max_bytes:
                found.append(StepOutput())
                room = max_bytes
            return found[-1]

        for uid, own in extras.items():
            opening_of[uid] = part_of[uid] = part_for(sum(len(extra.data) for extra in own))
            for extra in own:
                part_of[uid] = part_for(len(extra.data))
                part_of[uid].tokens.extras.append(extra)
                room -= len(extra.data)
        for uid, new in zip(tokens.uids, tokens.rows(), strict=True):
            part_of[uid].tokens.add(uid, [new] if isinstance(new, int) else new)
        for opened in self.opened:
            opening_of.get(opened.first_token.uid, found[0]).opened.append(opened)
        for uid in self.preempted:
            part_of.get(uid, found[-1]).preempted.append(uid)
        for end in self.ended:
            part_of.get(end.uid, found[-1]).ended.append(end)
        return found


# ---------------------------------------------------------------- to the frontend


class TextChunks(Struct, tag="text_chunks", array_like=True, gc=False):
    """New tokens of one step, with ``texts[i]`` for ``tokens.uids[i]``. A uid can be there more than once.

    A request may be in ``ended`` and in the columns; its chunk comes first. ``num_open``: requests that the
    detokenizer holds after this frame; None: it is not from there. ``first_tokens``: of requests that have one now,
    with or without a chunk. ``preempted``: uids of requests that were preempted since the frame before, once for each
    time. ``compiled``: uids of streams whose grammar is compiled; these come straight from the scheduler.
    """

    tokens: TokenColumns = field(default_factory=TokenColumns)
    texts: list[str] = []
    ended: list[End] = []
    num_open: int | None = None
    first_tokens: list[FirstToken] = []
    preempted: list[int] = []
    compiled: list[int] = []

    def __post_init__(self) -> None:
        if len(self.tokens.uids) != len(self.texts):
            raise BadColumnsError(f"{len(self.tokens.uids)} uids and {len(self.texts)} texts")

    @property
    def has_news(self) -> bool:
        """Whether it is more than a heartbeat."""
        return bool(self.texts or self.tokens.extras or self.ended or self.first_tokens or self.preempted)


class Totals(Struct, array_like=True, gc=False):
    """Counters of the scheduler that never fall."""

    num_preemptions: int = 0
    num_steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    num_finished: int = 0
    num_aborted: int = 0


class Stats(Totals, tag="stats", array_like=True, gc=False):
    """The scheduler's totals and present state.

    Sent a few times a second while it works, once on going idle, and as a heartbeat. ``num_free_pages``: free, or only
    held by the prefix cache, pinned or not. ``num_pinned_pages``: kept for sessions, and used by no request. Times are
    absolute; ``step_ended_at``: of the last step, 0: there was none.
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
    """The answer to a ``Control``. ``data`` is JSON text, ``payload`` bytes; both may be empty.

    ``stage``: where the call failed ("crash": its process died; "control": the runner raised an exception); empty for a
    success and for a refusal. A reply with a stage is raised as RequestError.
    """

    call_id: int
    success: bool
    message: str = ""
    data: str = ""
    stage: str = ""
    payload: bytes = b""


class Ready(Struct, tag="ready", array_like=True, gc=False):
    """A child is up. ``fingerprint`` is that of its protocol; ``facts`` is JSON text about what it runs on.

    The scheduler's facts hold at least ``num_pages``, ``page_size``, ``max_total_tokens``, ``dtype``, ``device``,
    ``attention_backend``, ``weights_bytes``, ``kv_pool_bytes`` and ``load_s``.
    """

    role: Role
    pid: int
    fingerprint: str
    facts: str = "{}"


class Failed(Struct, tag="failed", array_like=True, gc=False):
    """A child could not start, or its loop ended by an exception; its process exits after this."""

    role: Role
    error_type: str
    message: str
    traceback: str = ""


class Progress(Struct, tag="progress", array_like=True, gc=False):
    """Long work in a child: ``done`` of ``total`` ``unit``s. The frontend draws the bar."""

    label: str
    done: int
    total: int
    unit: str = "it"


class LogRecord(Struct, tag="log", array_like=True, gc=False):
    """A record of a child's ``aioengine.*`` logger, to be handled by the same logger of the frontend."""

    logger: str
    level: int
    message: str


ToScheduler = Submit | Abort | Suspend | Resume | Control
ToDetokenizer = StepOutput
ToFrontend = TextChunks | Stats | Reply | Ready | Failed | Progress | LogRecord
Message = ToScheduler | NewEpoch | ToDetokenizer | ToFrontend


class Frame(Struct, array_like=True, gc=False):
    """What one send carries. A receiver drops frames of another ``epoch`` than the one that it knows.

    ``sender``: a random number for each sender. ``number``: how many frames it sent before, so that a repeated or
    missing frame is noticed.
    """

    epoch: int
    sender: int
    number: int
    messages: list[Message]


def new_epoch_in(messages: Iterable[Message]) -> NewEpoch | None:
    """The message that begins another epoch; all messages received together with it are of the old epoch."""
    return next((message for message in messages if isinstance(message, NewEpoch)), None)

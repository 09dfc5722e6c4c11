"""The public results: chunks, answers, batches of answers, and finish reasons."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar, Literal, NotRequired, Protocol, SupportsIndex, TypedDict, cast, overload

from aioengine import errors
from aioengine.api import checks
from aioengine.protocol.columns import HIDDEN_STATES, PROMPT_STATES, Extra, draft_counts
from aioengine.protocol.messages import End, FinishCode

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    import numpy.typing as npt
    from typing_extensions import TypeVar

    from aioengine.protocol.packed_logprobs import Entry


FinishType = Literal["stop", "length", "abort", "deadline", "shutdown"]


class FinishReason(dict[str, str | int | None]):
    """Why a request ended: ``{"type": "stop", "matched": ...}``, ``{"type": "length", "length": N}``,
    ``{"type": "abort", "message": ...}``, ``{"type": "deadline", "which": ...}`` or
    ``{"type": "shutdown", "message": ...}``.

    It also compares equal to its type string and prints as it. ``["matched"]`` is None if nothing matched. In a stream
    with ``return_exceptions=True``, a failed row ends with the reason "abort", and ``err_type`` names the error.
    """

    @overload
    def __getitem__(self, key: Literal["type"]) -> FinishType: ...
    @overload
    def __getitem__(self, key: Literal["length"]) -> int: ...
    @overload
    def __getitem__(self, key: Literal["message", "err_type", "which"]) -> str: ...
    @overload
    def __getitem__(self, key: str) -> str | int | None: ...
    def __getitem__(self, key: str) -> str | int | None:
        return super().__getitem__(key)

    def __missing__(self, key: str) -> None:
        if key != "matched":
            raise KeyError(key)

    def __eq__(self, other: object) -> bool:
        return self["type"] == other if isinstance(other, str) else super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:  # type: ignore[override]  # equal to its type string, so hashed like it
        return hash(self["type"])

    def __str__(self) -> str:
        return self["type"]


VersionSpan = tuple[str, int, int]
"""A version of the weights, and the output tokens (from, to) that they computed."""

OutputEntry = tuple[float, int, str | None]
"""Logprob, token id and text of an output token."""


class Timings(TypedDict):
    """The times of a finished request, in seconds. The first five add up to ``total_s``.

    ``first_token_s`` is the time from the call to the first token; None without a token.
    """

    tokenize_s: float
    queue_s: float
    prefill_s: float
    decode_s: float
    deliver_s: float
    first_token_s: float | None
    total_s: float


class CommonInfo(TypedDict):
    """The facts about a request at any time.

    The logprobs (with ``return_logprob``) are tuples (logprob, token id, text or None). ``output_...`` belong to
    ``output_ids``, ``input_...`` to the prompt; in a stream, the first chunk has the latter. Only position 0 of a
    prompt has no logprob.

    weight_version: version of the weights that computed the last token of this output.
    image_tokens: number of tokens of the prompt's images. num_retractions: another name of ``num_preemptions``.
    reasoning_tokens: always 0, because tokens of reasoning are not counted separately.
    """

    id: str
    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    weight_version: str
    dp_rank: int | None
    seed: int
    cached_tokens: int
    num_preemptions: int
    num_retractions: int
    image_tokens: NotRequired[int]
    # The next keys, ``index`` and ``prompt_token_ids`` exist only if the call asks for them. They are typed as
    # required, so that type checkers accept the code of such a call.
    output_token_logprobs: list[OutputEntry]
    output_token_logprobs_length: int
    output_top_logprobs: list[list[OutputEntry]]
    output_token_ids_logprobs: list[list[OutputEntry]]
    input_token_logprobs: list[Entry]
    input_top_logprobs: list[list[Entry] | None]
    input_token_ids_logprobs: list[list[Entry] | None]
    hidden_states: list[npt.NDArray[np.float32]]
    sequence_score: float
    # Only finished answers of an engine with ``speculative_algorithm`` have these.
    spec_verify_ct: int
    spec_num_proposed_drafts: int
    spec_num_correct_drafts: int
    spec_accept_rate: float
    spec_accept_length: float


class MetaInfo(CommonInfo):
    """The facts about a finished request."""

    finish_reason: FinishReason
    cached_tokens_details: dict[str, int]
    e2e_latency: float
    timings: Timings
    weight_versions: list[VersionSpan]


class ChunkInfo(CommonInfo):
    """The ``meta_info`` of a chunk. Only the last chunk has a ``finish_reason`` and the keys that are not required."""

    finish_reason: FinishReason | None
    cached_tokens_details: NotRequired[dict[str, int]]
    e2e_latency: NotRequired[float]
    timings: NotRequired[Timings]
    weight_versions: NotRequired[list[VersionSpan]]


class Answer(TypedDict):
    """The whole output of one request. ``extras``: other results of the runner, if any."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    prompt_token_ids: list[int]
    extras: NotRequired[list[Extra]]


class Chunk(TypedDict):
    """A piece of a stream: the output since the last chunk, and its offset in characters and tokens.

    ``index``: the row of this chunk, in batches and with ``n`` > 1. ``extras``: other results of the runner, if any.
    """

    text: str
    output_ids: list[int]
    meta_info: ChunkInfo
    text_offset: int
    token_offset: int
    index: int
    prompt_token_ids: list[int]
    extras: NotRequired[list[Extra]]


class Embedding(TypedDict):
    """The vector of one text: fp32 [D]."""

    embedding: npt.NDArray[np.float32]
    meta_info: MetaInfo


class Ranking(TypedDict):
    """The score of a query and a document. ``index``: of the document in the call."""

    score: float
    index: int
    meta_info: MetaInfo


class MetaColumns(list[MetaInfo]):
    """The ``meta_info`` of a batch. A key returns the list of its values, one for each row (None if a row lacks it).

    The entry of a failed row (``return_exceptions=True``) is its exception.
    """

    @overload
    def __getitem__(self, key: SupportsIndex) -> MetaInfo: ...
    @overload
    def __getitem__(self, key: slice) -> MetaColumns: ...
    @overload
    def __getitem__(
        self, key: Literal["prompt_tokens", "completion_tokens", "cached_tokens", "num_preemptions", "seed"]
    ) -> list[int]: ...
    @overload
    def __getitem__(self, key: Literal["finish_reason"]) -> list[FinishReason]: ...
    @overload
    def __getitem__(self, key: Literal["id"]) -> list[str]: ...
    @overload
    def __getitem__(self, key: str) -> object: ...
    def __getitem__(self, key: SupportsIndex | slice | str) -> object:
        if isinstance(key, str):
            return _column(self, key)
        return MetaColumns(super().__getitem__(key)) if isinstance(key, slice) else super().__getitem__(key)


if TYPE_CHECKING:
    RowType = TypeVar("RowType", default=Answer)
else:
    from typing import TypeVar

    RowType = TypeVar("RowType")


class BatchOutput(list[RowType]):
    """The answers, embeddings or scores of a batch, in the order of its prompts (``n`` samples of a prompt together).

    A list of dicts that also accepts a column name: ``outs["text"]`` is the list of texts, and
    ``outs["meta_info"]["completion_tokens"]`` the list of counts. With ``return_exceptions=True``, the entry of a
    failed row is its exception, in columns too.
    """

    @overload
    def __getitem__(self, key: SupportsIndex) -> RowType: ...
    @overload
    def __getitem__(self, key: slice) -> BatchOutput[RowType]: ...
    @overload
    def __getitem__(self, key: Literal["text"]) -> list[str]: ...
    @overload
    def __getitem__(self, key: Literal["embedding"]) -> list[npt.NDArray[np.float32]]: ...
    @overload
    def __getitem__(self, key: Literal["score"]) -> list[float]: ...
    @overload
    def __getitem__(self, key: Literal["index"]) -> list[int]: ...
    @overload
    def __getitem__(self, key: Literal["output_ids", "prompt_token_ids"]) -> list[list[int]]: ...
    @overload
    def __getitem__(self, key: Literal["meta_info"]) -> MetaColumns: ...
    @overload
    def __getitem__(self, key: str) -> object: ...
    def __getitem__(self, key: SupportsIndex | slice | str) -> object:
        if isinstance(key, str):
            column = _column(self, key)
            return MetaColumns(cast("list[MetaInfo]", column)) if key == "meta_info" else column
        return BatchOutput(super().__getitem__(key)) if isinstance(key, slice) else super().__getitem__(key)


def _column(rows: Sequence[object], key: str) -> list[object]:
    """Return the value of ``key`` in each row, and exceptions unchanged. Raises KeyError for a key that no row has."""
    dicts = [cast("dict[str, object]", row) for row in rows if isinstance(row, dict)]
    if dicts and not any(key in row for row in dicts):
        known = list(dict.fromkeys(name for row in dicts for name in row))
        raise KeyError(f"no column {key!r}{checks.did_you_mean(key, known)}; the columns are {', '.join(known)}")
    return [cast("dict[str, object]", row).get(key) if isinstance(row, dict) else row for row in rows]


class ExtraDecoder(Protocol):
    """Collects extras of one row, and converts them to entries of ``meta_info``.

    kinds: the kinds of extras that it decodes. num_entries: the number of entries that it has decoded.
    """

    kinds: ClassVar[frozenset[str]]
    num_entries: int

    def decode(self, extra: Extra) -> None: ...
    def lists(self, start: int, end: int, *, keeps: bool) -> dict[str, object]:
        """Return the entries of the output tokens from ``start`` to ``end``. ``keeps``: they may be needed again."""
        ...


class HiddenStateDecoder:
    """Converts the hidden states of one row to arrays."""

    __slots__ = ("_arrays", "_shape", "num_entries")

    kinds: ClassVar[frozenset[str]] = frozenset((HIDDEN_STATES, PROMPT_STATES))

    def __init__(self, num_prompt: int, hidden_size: int) -> None:
        self.num_entries = 0
        self._shape = num_prompt, hidden_size
        self._arrays: dict[int, npt.NDArray[np.float32]] = {}

    def decode(self, extra: Extra) -> None:
        """Add the state of a token, [D], or a block of the prompt's states. It replaces earlier states of its tokens.

        The array of the first token is [prompt, D].
        """
        is_prompt = extra.kind == PROMPT_STATES
        if extra.index and not is_prompt:
            self._arrays[extra.index] = array(extra.data)
        else:
            from numpy import empty, float32, frombuffer  # as in array

            if 0 not in self._arrays:
                self._arrays[0] = empty(self._shape, float32)
            states = frombuffer(extra.data, float32).reshape(-1, self._shape[1])
            start = extra.index if is_prompt else self._shape[0] - 1
            self._arrays[0][start : start + len(states)] = states
        self.num_entries += 1

    def lists(self, start: int, end: int, *, keeps: bool) -> dict[str, object]:
        indices = [index for index in range(start, end) if index in self._arrays]
        return {"hidden_states": list(map(self._arrays.__getitem__ if keeps else self._arrays.pop, indices))}


def array(data: bytes) -> npt.NDArray[np.float32]:
    """Return a writable copy of packed float32 numbers."""
    from numpy import float32, frombuffer  # slow to import, and most programs need no arrays

    return frombuffer(data, float32).copy()


def draft_info(drafts: Mapping[int, Extra], num_output: int) -> dict[str, int | float]:
    """Return the ``spec_...`` entries of ``meta_info``. drafts: extras of kind ``DRAFTS`` by token index.

    A step gives its accepted drafts and one more token. Accepted drafts after the end of the output do not count. After
    a crash, steps may be computed again with other drafts, so a step counts only up to the next one.
    """
    num_proposed = num_correct = 0
    starts = sorted(index for index in drafts if index < num_output)
    for start, end in pairwise([*starts, num_output]):
        proposed, accepted = draft_counts(drafts[start])
        num_proposed += proposed
        num_correct += min(accepted, end - start - 1)
    num_steps = num_output - num_correct
    return {
        "spec_verify_ct": num_steps,
        "spec_num_proposed_drafts": num_proposed,
        "spec_num_correct_drafts": num_correct,
        "spec_accept_rate": num_correct / num_proposed if num_proposed else 0.0,
        "spec_accept_length": num_output / num_steps if num_steps else 0.0,
    }


def version_spans(first: str, changes: Mapping[int, str], num_output: int) -> list[VersionSpan]:
    """Return the versions of the weights that computed the output tokens. There is at least one span.

    first: of the first token. changes: index of a token -> version from this token on.
    """
    spans: list[VersionSpan] = [(first, 0, num_output)]
    for index in sorted(changes):
        version, start, stop = spans[-1]
        if index >= num_output or changes[index] == version:
            continue
        if index > start:
            spans[-1] = (version, start, index)
        else:
            spans.pop()
        spans.append((changes[index], index, stop))
    return spans


def ranked(results: Sequence[Answer | BaseException | None], top_n: int | None) -> list[Answer | BaseException | None]:
    """Return the ``top_n`` best scores (None: all), best first, followed by the errors."""
    best = sorted(
        (entry for entry in results if isinstance(entry, dict)), key=lambda entry: -cast("Ranking", entry)["score"]
    )
    return [*best[:top_n], *(entry for entry in results if isinstance(entry, BaseException))]


def finish_reason(end: End, num_output: int, cause: RowError | None = None) -> FinishReason:
    """Return the finish reason of a request. ``cause``: its error, if it failed."""
    match end.code:
        case FinishCode.STOP:
            return FinishReason(type="stop", matched=end.matched)
        case FinishCode.LENGTH:
            return FinishReason(type="length", length=num_output)
        case FinishCode.DEADLINE:
            return FinishReason(type="deadline", which=end.matched)
        case FinishCode.SHUTDOWN:
            return FinishReason(type="shutdown", message=end.message or "the engine was drained or shut down")
        case FinishCode.ABORT:
            return FinishReason(type="abort", message=end.message or "aborted by the caller")
        case _:
            cause = cause or error(end)
            return FinishReason(type="abort", message=str(cause), err_type=type(cause).__name__)


def error(end: End) -> RowError | None:
    """Return the error of a request; None if it has an answer, even an incomplete one."""
    if end.code <= FinishCode.SHUTDOWN:
        return None
    if end.code is FinishCode.TOO_LARGE:
        return errors.RequestTooLargeError(end.message)
    if end.code is FinishCode.UNSUPPORTED:
        return errors.UnsupportedSchemaError(end.message, pointer=end.stage, keyword=str(end.matched or ""))
    if end.code is FinishCode.FAILED:
        return errors.RequestError(end.stage, end.message)
    missed_ms = end.matched if isinstance(end.matched, int) else 1000
    message = f"the request would miss its deadline: {end.message}"
    return errors.EngineOverloadedError(message, retry_after=missed_ms / 1000)


RowError = errors.EngineError | ValueError | TypeError
"""The errors that one row of a call may end with instead of an answer."""


def named(error: RowError, prompt_index: int, num_prompts: int) -> RowError:
    """Return the error that a prompt of a batch raises for the whole call. Its message has the number of the prompt."""
    message = str(error)
    if (
        num_prompts > 1
        and isinstance(error, ValueError | TypeError | errors.RequestError)
        and re.search(rf"\w\[{prompt_index}\]| of prompt {prompt_index}\b", message) is None
    ):
        error.args = (f"prompt {prompt_index}: {message}",)
    return error

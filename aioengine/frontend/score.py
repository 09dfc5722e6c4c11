"""Scores of items behind a query, on top of the calls that everybody makes.

With a model that generates, an item's scores are the probabilities of the label tokens as its next token: one request
for each item, which gives no token, and finds the query in the prefix cache. With a classifier they are its scores.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence  # noqa: TC003  # for the annotations of the options
from typing import TYPE_CHECKING, Annotated, Any, Final, TypedDict, cast

from msgspec import Meta, Struct, ValidationError, convert

from aioengine import checks
from aioengine.errors import RequestError
from aioengine.frontend.requests import check_names

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from aioengine.answers import BatchOutput, Embedding
    from aioengine.frontend.frontend import Running

MAX_LABELS: Final = 1 << 17
MAX_TEMPERATURE: Final = 1e6
_ENTRIES_PER_TURN: Final = 4096
"""Items and labels that are read in one turn of the event loop, some 10 ms."""
ITEMS: Final = "a string, or a list of strings or of lists of token ids"
LABELS: Final = "a list of token ids, or one for each item"

_Ids = list[Annotated[int, Meta(ge=0, le=checks.MAX_COUNT)]]


class ScoreOptions(TypedDict, total=False):
    """Keyword arguments of ``score``.

    apply_softmax: probabilities among the labels alone, at ``temperature`` (1 by default).
    item_first: the prompt is the item, then the query.
    return_token_logprobs: the result has ``token_logprobs``, the log-probabilities of the labels.
    lora_path: as for ``generate``; a list has one for each item.
    """

    apply_softmax: bool
    item_first: bool
    temperature: float
    return_token_logprobs: bool
    lora_path: str | Sequence[str | None] | None


class ScoreResult(list[list[float]]):
    """The scores of each item, in the order of its labels.

    Attributes:
        prompt_tokens: of all items, with the query each time.
        token_logprobs: log-probabilities of the labels, where they were asked for.
    """

    def __init__(
        self, scores: Sequence[list[float]], prompt_tokens: int = 0, token_logprobs: list[list[float]] | None = None
    ) -> None:
        super().__init__(scores)
        self.prompt_tokens = prompt_tokens
        self.token_logprobs = token_logprobs

    @property
    def scores(self) -> list[list[float]]:
        """The scores as a plain list."""
        return list(self)

    def __repr__(self) -> str:
        return f"ScoreResult({self.scores}, prompt_tokens={self.prompt_tokens}, token_logprobs={self.token_logprobs})"


class ScoreRequest(Struct, frozen=True, kw_only=True):
    """The arguments of ``score``, checked.

    Attributes:
        texts: query and item together. ids: the same where both are token ids.
        labels: of each item, or one list for all; None: those of a classifier.
        lora_path: as it was given; the calls check it.
    """

    texts: list[str] = []
    ids: list[list[int]] = []
    labels: list[list[int]] | None = None
    has_softmax: bool = False
    temperature: float = 1.0
    gives_logprobs: bool = False
    lora_path: object = None

    @property
    def num_items(self) -> int:
        return len(self.texts) or len(self.ids)

    def scores_of(self, logits: list[float]) -> list[float]:
        """From log-probabilities, or the scores of a classifier, to probabilities among them."""
        top = max(logits)
        weights = [math.exp((logit - top) / self.temperature) for logit in logits]
        total = sum(weights)
        return [weight / total for weight in weights]


async def score_request(
    query: object, items: object, labels: object, options: Mapping[str, object], *, parts: Running
) -> ScoreRequest:
    """Check a call of ``score``, many items in several turns of the loop.

    Raises:
        TypeError, ValueError: what is wrong, with the field and the value.
    """
    check_names(options, ("query", "items", "label_token_ids"), ScoreOptions.__annotations__)
    texts, ids = await _prompts(
        query, items, is_item_first=checks.switch("item_first", options.get("item_first", False))
    )
    model = parts.settings.model
    if model.task == "embed":
        raise ValueError("score needs a model that generates or classifies; this one gives embeddings")
    is_classifier = model.task == "classify"
    if labels is None and not is_classifier:
        raise ValueError("label_token_ids is missing: the token ids of which the probabilities are the scores")
    for place, joined in enumerate(texts or ids):
        if not joined and not is_classifier:
            raise ValueError(f"query and items[{place}] are both empty; give at least one character or token id")
    request = ScoreRequest(
        texts=texts,
        ids=ids,
        labels=None if labels is None or is_classifier else await _labels(labels, len(texts) or len(ids), parts),
        has_softmax=checks.switch("apply_softmax", options.get("apply_softmax", False)),
        temperature=checks.number("temperature", options.get("temperature", 1.0), 0, MAX_TEMPERATURE, above=True),
        gives_logprobs=checks.switch("return_token_logprobs", options.get("return_token_logprobs", False)),
        lora_path=options.get("lora_path"),
    )
    if request.temperature != 1.0 and not request.has_softmax:
        raise ValueError(f"temperature {request.temperature:g} needs apply_softmax=True")
    if request.gives_logprobs and is_classifier:
        raise ValueError("return_token_logprobs is for models that generate, and this one is a classifier")
    return request


class _Turns:
    """Long lists are read in several turns of the event loop."""

    def __init__(self) -> None:
        self._num_left = _ENTRIES_PER_TURN

    async def read(self, num: int = 1) -> None:
        """So many entries were read: the next ones may have to wait for the next turn."""
        self._num_left -= num
        if self._num_left <= 0:
            self._num_left = _ENTRIES_PER_TURN
            await asyncio.sleep(0)


async def _prompts(query: object, items: object, *, is_item_first: bool) -> tuple[list[str], list[list[int]]]:
    """Query and item of each prompt together: as texts, or as ids."""
    if items is None:
        raise ValueError("items is missing: the texts (or lists of token ids) to be scored")
    given: list[Any] = (
        [items] if isinstance(items, str) else checks.items("items", items, checks.MAX_COUNT, allowed=ITEMS)
    )
    if given and all(_is_id(entry) for entry in given):
        given = [given]
    before = None if query is None else _text_or_ids("query", query)
    turns = _Turns()
    found: list[str | list[int]] = []
    for place, entry in enumerate(given):
        found.append(_text_or_ids(f"items[{place}]", entry))
        await turns.read(1 if isinstance(entry, str) else len(found[-1]))
    first = ("query", before) if before is not None or not found else ("items[0]", found[0])
    kind: type[Any] = type(first[1])
    for place, entry in enumerate(found):
        if not isinstance(entry, kind):
            raise ValueError(
                f"items[{place}] is {checks.shown(entry)} and {first[0]} is {checks.shown(first[1])}; give all of them "
                "as texts, or all as lists of token ids"
            )
    shared: Any = kind() if before is None else before
    joined: list[Any] = []
    for each in cast("list[Any]", found):
        joined.append(each + shared if is_item_first else shared + each)
        await turns.read(1 + len(joined[-1]) // 1000)
    return ([], joined) if kind is list else (joined, [])


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _text_or_ids(name: str, value: object) -> str | list[int]:
    if isinstance(value, str):
        return checks.text(name, value)
    entries = checks.items(name, value, checks.MAX_COUNT, allowed="a string or a list of token ids")
    try:
        return convert(entries, _Ids)  # in one pass where all are plain integers
    except ValidationError:
        return [checks.whole(f"{name} entries", entry, 0) for entry in entries]


async def _labels(value: object, num_items: int, parts: Running) -> list[list[int]]:
    """One list for all items, or one for each."""
    given = checks.items("label_token_ids", value, checks.MAX_COUNT, allowed=LABELS)
    if not given:
        raise ValueError("label_token_ids is empty; give at least one token id")
    size = parts.settings.model.vocab_size if parts.tokenizer is None else parts.tokenizer.vocab_size
    turns = _Turns()
    if not isinstance(checks.plain(given[0]), list | tuple):
        given = checks.items("label_token_ids", given, MAX_LABELS)
        return [await _checked_labels("label_token_ids", given, size, turns)]
    if len(given) != num_items:
        lists, items = checks.counted(len(given), "list"), checks.counted(num_items, "item")
        raise ValueError(f"label_token_ids has {lists} for {items}; give one for each")
    found: list[list[int]] = []
    for place, row in enumerate(given):
        name = f"label_token_ids[{place}]"
        found.append(await _checked_labels(name, checks.items(name, row, MAX_LABELS), size, turns))
    return found


async def _checked_labels(name: str, given: list[object], vocab_size: int, turns: _Turns) -> list[int]:
    seen = dict[int, None]()
    for entry in given:
        if isinstance(entry, str):
            allowed = f"token ids, such as engine.tokenizer.encode({checks.shown(entry)}, add_special_tokens=False)"
            raise checks.wrong_type(f"{name} entries", allowed, entry)
        label = checks.whole(f"{name} entries", entry, 0, vocab_size - 1)
        if label in seen:
            raise ValueError(f"{name} has {label} twice; give each label once")
        seen[label] = None
        await turns.read()
    if not seen:
        raise ValueError(f"{name} is empty; give at least one token id")
    return list(seen)


async def score(
    request: ScoreRequest, *, generate: Callable[..., Awaitable[Any]], encode: Callable[..., Awaitable[Any]]
) -> ScoreResult:
    """Compute the items of a call, which share the beginning of their prompts.

    Raises:
        RequestError: an item ended before its scores were there: it was aborted.
        Exception: what ``generate`` and ``encode`` raise.
    """
    if not request.num_items:
        return ScoreResult([])
    prompts: dict[str, Any] = {"prompt": request.texts} if request.texts else {"input_ids": request.ids}
    if request.lora_path is not None:
        prompts["lora_path"] = request.lora_path
    turns = _Turns()
    scores: list[list[float]] = []
    if request.labels is None:
        vectors = cast("BatchOutput[Embedding]", await encode(**prompts))
        for vector in vectors:
            row = vector["embedding"].tolist()
            scores.append(request.scores_of(row) if request.has_softmax else row)
            await turns.read(len(row))
        return ScoreResult(scores, sum(vectors["meta_info"]["prompt_tokens"]))
    labels = request.labels[0] if len(request.labels) == 1 else request.labels
    outs = cast(
        "BatchOutput",
        await generate(
            **prompts,
            sampling_params={"max_new_tokens": 0, "temperature": 1.0},
            return_logprob=True,
            token_ids_logprob=labels,
        ),
    )
    logprobs: list[list[float]] = []
    num_tokens = 0
    for out in outs:
        info = out["meta_info"]
        num_tokens += info["prompt_tokens"]
        given = info.get("output_token_ids_logprobs")
        if not given:
            raise RequestError(
                "schedule", f"it ended before its scores were there: {dict(info['finish_reason'] or {})}"
            )
        row = [-math.inf if logprob is None else logprob for logprob, _, _ in given[0]]
        logprobs.append(row)
        scores.append(request.scores_of(row) if request.has_softmax else [math.exp(logprob) for logprob in row])
        await turns.read(len(row))
    return ScoreResult(scores, num_tokens, logprobs if request.gives_logprobs else None)

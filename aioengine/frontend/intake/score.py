"""``score``: scores of items after a query, computed by calls of ``generate`` and ``encode``.

With a generative model, the scores of an item are the probabilities of the label tokens as the next token. Each item is
one request that generates no token and finds the query in the prefix cache. With a classifier, they are its scores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence  # for the annotations of the options
from typing import TYPE_CHECKING, Annotated, Any, Final, TypedDict, cast

from msgspec import Meta, Struct, ValidationError, convert

from aioengine.api import checks
from aioengine.errors import RequestError
from aioengine.frontend.intake.prompt_options import PROMPTS_IN_PIECE
from aioengine.frontend.intake.requests import check_names

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from typing_extensions import TypeVar

    from aioengine.frontend.engine_parts import EngineParts

    Scores = TypeVar("Scores", default=list[float])
else:
    from typing import TypeVar

    Scores = TypeVar("Scores")

MAX_LABELS: Final = 1 << 17
MAX_TEMPERATURE: Final = 1e6
ITEMS: Final = "a string, or a list of strings or of lists of token ids"
LABELS: Final = "a list of token ids, or one for each item"

_Ids = list[Annotated[int, Meta(ge=0, le=checks.MAX_COUNT)]]


class PlainScoreOptions(TypedDict, total=False):
    """``ScoreOptions`` without ``return_exceptions``, which changes the type of the result."""

    apply_softmax: bool
    item_first: bool
    temperature: float
    return_token_logprobs: bool
    lora_path: str | Sequence[str | None] | None


class ScoreOptions(PlainScoreOptions, total=False):
    """Keyword arguments of ``score``.

    apply_softmax: return the softmax over the labels only, at ``temperature`` (default: 1).
    item_first: put the item before the query.
    return_token_logprobs: the result has ``token_logprobs``, the logprobs of the labels.
    lora_path: as for ``generate``; a list has one entry per item.
    return_exceptions: a wrong or failed item has its exception instead of its scores.
    """

    return_exceptions: bool


class ScoreResult(list[Scores]):
    """The scores of each item, in the order of its labels.

    With ``return_exceptions=True``, a failed item has its exception instead of its scores and its ``token_logprobs``.

    Attributes:
        prompt_tokens: the number of prompt tokens of all items with scores. The query counts once per item.
        token_logprobs: the logprobs of the labels, with ``return_token_logprobs``.
    """

    def __init__(
        self, scores: Sequence[Scores], prompt_tokens: int = 0, token_logprobs: list[Scores] | None = None
    ) -> None:
        super().__init__(scores)
        self.prompt_tokens = prompt_tokens
        self.token_logprobs = token_logprobs

    @property
    def scores(self) -> list[Scores]:
        """Return the scores as a plain list."""
        return list(self)

    def __repr__(self) -> str:
        return f"ScoreResult({self.scores}, prompt_tokens={self.prompt_tokens}, token_logprobs={self.token_logprobs})"


class ScoreRequest(Struct, kw_only=True):
    """The checked arguments of ``score``.

    Attributes:
        prompts: query and item together, as texts or as token ids.
        labels: token ids of each item, or one list for all; None: the model is a classifier.
        lora_path: the value of the caller; the calls check it.
        errors: errors of items that fail alone, by index. Their prompts and labels are not used.
    """

    prompts: list[str] | list[list[int]] = []
    labels: list[list[int]] | None = None
    has_softmax: bool = False
    temperature: float = 1.0
    gives_logprobs: bool = False
    lora_path: object = None
    returns_exceptions: bool = False
    errors: dict[int, Exception] = {}

    def fail_item(self, index: int, error: TypeError | ValueError) -> None:
        """Fail an item with this error. If items do not fail alone, raise the error."""
        if not self.returns_exceptions:
            raise error
        self.errors.setdefault(index, error)

    def scores_of(self, logits: list[float]) -> list[float]:
        """Return the softmax of log-probabilities, or of the scores of a classifier, at ``temperature``."""
        top = max(logits)
        weights = [math.exp((logit - top) / self.temperature) for logit in logits]
        total = sum(weights)
        return [weight / total for weight in weights]


def score_request(
    query: object, items: object, labels: object, options: Mapping[str, object], *, parts: EngineParts
) -> ScoreRequest:
    """Check a call of ``score``. Runs on any thread, because long lists take time.

    Raises:
        TypeError, ValueError: an argument is wrong; the message has its name and value.
    """
    check_names(options, ("query", "items", "label_token_ids"), ScoreOptions.__annotations__)
    model = parts.settings.model
    if model.task == "embed":
        raise ValueError("score needs a model that generates or classifies; this one gives embeddings")
    is_classifier = model.task == "classify"
    if labels is None and not is_classifier:
        raise ValueError("label_token_ids is missing; give the token ids whose probabilities are the scores")
    request = ScoreRequest(
        has_softmax=checks.switch("apply_softmax", options.get("apply_softmax", False)),
        temperature=checks.number("temperature", options.get("temperature", 1.0), 0, MAX_TEMPERATURE, above=True),
        gives_logprobs=checks.switch("return_token_logprobs", options.get("return_token_logprobs", False)),
        lora_path=options.get("lora_path"),
        returns_exceptions=checks.switch("return_exceptions", options.get("return_exceptions", False)),
    )
    if request.temperature != 1.0 and not request.has_softmax:
        raise ValueError(f"temperature {request.temperature:g} needs apply_softmax=True")
    if request.gives_logprobs and is_classifier:
        raise ValueError("return_token_logprobs is for models that generate, and this one is a classifier")
    is_item_first = checks.switch("item_first", options.get("item_first", False))
    _add_prompts(request, query, items, is_item_first=is_item_first, may_be_empty=is_classifier)
    if not is_classifier:
        _add_labels(request, labels, parts)
    return request


def _add_prompts(
    request: ScoreRequest, query: object, items: object, *, is_item_first: bool, may_be_empty: bool
) -> None:
    """Add the prompts: query and item together, as texts or as ids."""
    if items is None:
        raise ValueError("items is missing: the texts (or lists of token ids) to be scored")
    entries: list[Any] = (
        [items] if isinstance(items, str) else checks.items("items", items, checks.MAX_COUNT, allowed=ITEMS)
    )
    if entries and all(isinstance(entry, int) and not isinstance(entry, bool) for entry in entries):
        entries = [entries]
    shared: Any = None if query is None else _text_or_ids("query", query)
    first = None if shared is None else ("query", shared)
    prompts: list[Any] = []
    for index, entry in enumerate(entries):
        try:
            item = _text_or_ids(f"items[{index}]", entry)
            first = first or (f"items[{index}]", item)
            if not isinstance(item, type(first[1])):
                raise ValueError(
                    f"items[{index}] is {checks.shown(item)} and {first[0]} is {checks.shown(first[1])}; give all of "
                    "them as texts, or all as lists of token ids"
                )
            if not item and not shared and not may_be_empty:
                raise ValueError(f"query and items[{index}] are both empty; give at least one character or token id")
        except (TypeError, ValueError) as error:
            request.fail_item(index, error)
            item = type(first[1])() if first else ""
        prompts.append(item if shared is None else item + shared if is_item_first else shared + item)
    request.prompts = prompts


def _text_or_ids(name: str, value: object) -> str | list[int]:
    if isinstance(value, str):
        return checks.text(name, value)
    entries = checks.items(name, value, checks.MAX_COUNT, allowed="a string or a list of token ids")
    try:
        return convert(entries, _Ids)  # fast, if all are plain integers
    except ValidationError:
        return [checks.whole(f"{name} entries", entry, 0) for entry in entries]


def _add_labels(request: ScoreRequest, value: object, parts: EngineParts) -> None:
    """Add the labels: one list for all items, or one list per item."""
    given = checks.items("label_token_ids", value, checks.MAX_COUNT, allowed=LABELS)
    if not given:
        raise ValueError("label_token_ids is empty; give at least one token id")
    size = parts.settings.model.vocab_size if parts.tokenizer is None else parts.tokenizer.vocab_size
    if not any(isinstance(checks.plain(entry), list | tuple) for entry in given[:PROMPTS_IN_PIECE]):
        given = checks.items("label_token_ids", given, MAX_LABELS)
        request.labels = [_checked_labels("label_token_ids", given, size)]
        return
    if len(given) != len(request.prompts):
        lists, items = checks.counted(len(given), "list"), checks.counted(len(request.prompts), "item")
        raise ValueError(f"label_token_ids has {lists} for {items}; give one for each")
    request.labels = []
    for index, row in enumerate(given):
        name = f"label_token_ids[{index}]"
        try:
            request.labels.append(_checked_labels(name, checks.items(name, row, MAX_LABELS), size))
        except (TypeError, ValueError) as error:
            request.fail_item(index, error)
            request.labels.append([])


def _checked_labels(name: str, given: list[object], vocab_size: int) -> list[int]:
    seen = dict[int, None]()
    for entry in given:
        if isinstance(entry, str):
            allowed = f"token ids, such as engine.tokenizer.encode({checks.shown(entry)}, add_special_tokens=False)"
            raise checks.wrong_type(f"{name} entries", allowed, entry)
        label = checks.whole(f"{name} entries", entry, 0, vocab_size - 1)
        if label in seen:
            raise ValueError(f"{name} has {label} twice; give each label once")
        seen[label] = None
    if not seen:
        raise ValueError(f"{name} is empty; give at least one token id")
    return list(seen)


async def score(
    request: ScoreRequest, *, generate: Callable[..., Awaitable[Any]], encode: Callable[..., Awaitable[Any]]
) -> ScoreResult[Any]:
    """Compute the items of a call, which share the beginning of their prompts.

    Raises:
        RequestError: an item ended before its scores were computed: it was aborted.
        Exception: the errors of ``generate`` and ``encode``.
    """
    num_items, labels = len(request.prompts), request.labels
    scores: list[Any] = [request.errors.get(index) for index in range(num_items)]
    logprobs = scores.copy()
    indices = [index for index in range(num_items) if index not in request.errors]
    if not indices:
        return ScoreResult(scores, 0, logprobs if request.gives_logprobs else None)

    def chosen(values: Any) -> Any:
        """Return the values of the items that are computed."""
        is_list = isinstance(values, list | tuple) and len(cast("list[object]", values)) == num_items
        return [values[index] for index in indices] if is_list else values

    call: dict[str, Any] = {"return_exceptions": request.returns_exceptions}
    call["prompt" if isinstance(request.prompts[indices[0]], str) else "input_ids"] = chosen(request.prompts)
    if request.lora_path is not None:
        call["lora_path"] = chosen(request.lora_path)
    if labels is None:
        outs = await encode(**call)
    else:
        outs = await generate(
            **call,
            sampling_params={"max_new_tokens": 0, "temperature": 1.0},
            return_logprob=True,
            token_ids_logprob=labels[0] if len(labels) == 1 else chosen(labels),
        )
    num_tokens = 0
    for index, out in zip(indices, outs, strict=True):
        if isinstance(out, Exception):
            scores[index] = logprobs[index] = out
            continue
        info = out["meta_info"]
        num_tokens += info["prompt_tokens"]
        if labels is None:
            row = out["embedding"].tolist()
        elif given := info.get("output_token_ids_logprobs"):
            row = [-math.inf if logprob is None else logprob for logprob, _, _ in given[0]]
        else:
            error = RequestError("schedule", f"it ended before its scores were computed: {dict(info['finish_reason'])}")
            if not request.returns_exceptions:
                raise error
            scores[index] = logprobs[index] = error
            continue
        logprobs[index] = row
        if request.has_softmax:
            scores[index] = request.scores_of(row)
        else:
            scores[index] = row if labels is None else [math.exp(logprob) for logprob in row]
    return ScoreResult(scores, num_tokens, logprobs if request.gives_logprobs else None)

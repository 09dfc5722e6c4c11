"""Options that may differ between the prompts of a call: one value for all prompts, or a list with one value for each.

One value is checked at the call; the entries of a list are checked with their prompts, some at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Final, Generic, NamedTuple, Protocol, TypeVar, cast

from msgspec import Struct

from aioengine.api import checks
from aioengine.errors import RequestTooLargeError
from aioengine.protocol.packed_logprobs import LogprobRules

Value = TypeVar("Value")

PROMPTS_IN_PIECE: Final = 512
"""Rows of a batch that are checked at once, by the call or by a thread."""

MAX_TOKEN_IDS: Final = 65_536
"""Ids in ``token_ids_logprob`` of one prompt."""

MAX_PROMPT_VALUES: Final = 1 << 23
"""Logprobs of one prompt, which are sent in one message."""

MAX_OUTPUT_VALUES: Final = 1 << 25
"""Logprobs of the output tokens of one request, which may stay unread."""


class PerPrompt(Struct, Generic[Value]):
    """An option of a call: one value for all prompts, or a list with one value for each.

    Attributes:
        values: one for each prompt, or one for all. Entries of unchecked prompts are the caller's values.
    """

    name: str
    check: Callable[[object], Value]
    values: list[Value]
    is_list: bool

    def check_value(self, prompt_index: int) -> None:
        """Check the value of a prompt in a list. Raises TypeError or ValueError."""
        self.values[prompt_index] = self.check(self.values[prompt_index])

    def reset_value(self, prompt_index: int) -> None:
        """Set the value of a prompt in a list to the default."""
        self.values[prompt_index] = self.check(None)

    def of(self, prompt_index: int) -> Value:
        return self.values[prompt_index if self.is_list else 0]


class PromptCounts(Protocol):
    """The numbers of prompts and samples of a call (``CallRequest``)."""

    is_batch: bool
    num_prompts: int
    num_samples: int


def list_for(name: str, value: object, counts: PromptCounts, *, one: str = "") -> list[object]:
    """Return a list with one entry for each prompt. ``one``: a word for a single value; "": the name.

    Raises:
        TypeError, ValueError: there is only one prompt, or the number of prompts differs.
    """
    if not counts.is_batch:
        raise TypeError(f"{name} is a list, but there is one prompt; give a list of prompts, or one {one or name}")
    values = checks.items(name, value, checks.MAX_COUNT)
    if len(values) != counts.num_prompts:
        entries = checks.counted(len(values), "entry", "entries")
        raise ValueError(f"{name} has {entries} for {checks.counted(counts.num_prompts, 'prompt')}; give one for each")
    return values


def per_prompt(
    name: str, options: Mapping[str, object], check: Callable[[object], Value], counts: PromptCounts
) -> PerPrompt[Value] | None:
    """Return the option ``name``; None: it is not given. ``check_value`` checks the values of a list later."""
    value = options.get(name)
    if value is None:
        return None
    if isinstance(value, list | tuple):
        values = list_for(name, cast("object", value), counts)
        return PerPrompt(name, check, cast("list[Value]", values), is_list=True)
    return PerPrompt(name, check, [check(value)], is_list=False)


# ---------------------------------------------------------------- logprobs


class LogprobOptions(NamedTuple):
    """The logprobs options of a call."""

    wanted: PerPrompt[bool]
    start: PerPrompt[int]
    num_top: PerPrompt[int]
    token_ids: PerPrompt[tuple[int, ...]]
    with_text: PerPrompt[bool]

    @property
    def is_list(self) -> bool:
        """Whether one of them has one value per prompt."""
        return any(option.is_list for option in self)

    def of(self, prompt_index: int) -> LogprobRules | None:
        """Return the logprobs of a prompt; None: it wants none."""
        if not self.wanted.of(prompt_index):
            return None
        return _rules(*(option.of(prompt_index) for option in self[1:]))

    def check(self, prompt_index: int, vocab_size: int, *, has_tokenizer: bool) -> None:
        """Raise ValueError if the options of a prompt need a larger vocabulary or a missing tokenizer."""
        rules = self.of(prompt_index)
        if rules is None:
            return
        if rules.num_top > vocab_size:
            raise checks.wrong_value("top_logprobs_num", f"at most {vocab_size}, the vocabulary", rules.num_top)
        if rules.token_ids and max(rules.token_ids) >= vocab_size:
            wrong = next(token_id for token_id in rules.token_ids if token_id >= vocab_size)
            raise checks.wrong_value("token_ids_logprob", f"token ids from 0 to {vocab_size - 1}", wrong)
        if rules.with_text and not has_tokenizer:
            raise ValueError("return_text_in_logprobs needs a tokenizer, and this engine has none; leave it out")


_rules = lru_cache(maxsize=64)(LogprobRules)
"""Returns the same object for equal rules, because most rows of a call share them."""


_LOGPROB_OPTIONS: Final = (
    "return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob", "return_text_in_logprobs",
)  # fmt: skip


def logprob_options(options: Mapping[str, object], counts: PromptCounts) -> LogprobOptions | None:
    """Return the checked options; None: no prompt wants logprobs.

    Raises:
        TypeError, ValueError: an option is wrong, is a list with ``n`` above 1, or is given without
            ``return_logprob``.
    """
    if options.keys().isdisjoint(_LOGPROB_OPTIONS):
        return None
    logprobs = LogprobOptions(
        _option("return_logprob", options, checks.switch, counts, default=False),
        _option("logprob_start_len", options, partial(checks.whole, low=-1), counts, default=-1),
        _option("top_logprobs_num", options, partial(checks.whole, low=0), counts, default=0),
        _token_ids_option(options, counts),
        _option("return_text_in_logprobs", options, checks.switch, counts, default=False),
    )
    if options.get("return_logprob") is None:
        more = cast("tuple[PerPrompt[object], ...]", logprobs[1:])
        for option, off in zip(more, (-1, 0, (), False), strict=True):
            if option.is_list or option.of(0) != off:
                setting = f"{option.name}={checks.shown(options[option.name])}"
                raise ValueError(f"{setting} is given without return_logprob; add return_logprob=True")
    is_off = not logprobs.wanted.is_list and not logprobs.wanted.of(0)
    return None if is_off else logprobs


def _option(
    name: str,
    options: Mapping[str, object],
    check: Callable[[str, object], Value],
    counts: PromptCounts,
    *,
    default: Value,
) -> PerPrompt[Value]:
    def check_entry(value: object) -> Value:
        return default if value is None else check(name, value)

    if isinstance(options.get(name), list | tuple):
        _refuse_with_samples(name, counts)
    return per_prompt(name, options, check_entry, counts) or PerPrompt(name, check_entry, [default], is_list=False)


def _token_ids_option(options: Mapping[str, object], counts: PromptCounts) -> PerPrompt[tuple[int, ...]]:
    """Return the token ids for all prompts, or a list with token ids (or None) for each."""
    name = "token_ids_logprob"
    value = options.get(name)
    entries = () if value is None else checks.sequence(name, value, allowed="a list of token ids, or of such lists")
    first = entries[: PROMPTS_IN_PIECE if counts.is_batch else 1]  # wrong rows may come before a list
    if any(entry is None or isinstance(entry, list | tuple | checks.Array) for entry in first):
        _refuse_with_samples(name, counts)
        values = cast("list[tuple[int, ...]]", list_for(name, entries, counts))
        return PerPrompt(name, _token_ids, values, is_list=True)
    return PerPrompt(name, _token_ids, [_token_ids(entries)], is_list=False)


def _token_ids(value: object) -> tuple[int, ...]:
    name = "token_ids_logprob"
    if value is None:
        return ()
    entries = checks.sequence(name, value, MAX_TOKEN_IDS, allowed="a list of token ids")
    if set(map(type, entries)) <= {int} and min(cast("Sequence[int]", entries), default=0) >= 0:
        return tuple(cast("Sequence[int]", entries))
    return tuple(checks.whole(name, entry, 0) for entry in entries)


def _refuse_with_samples(name: str, counts: PromptCounts) -> None:
    if counts.num_samples > 1:
        raise ValueError(f"{name} is a list, and n is {counts.num_samples}; with n > 1 give one value for all prompts")


def check_lengths(rules: LogprobRules, *, num_prompt_tokens: int, num_output: int, has_ids: bool) -> None:
    """Check rules once the length of the prompt is known. ``has_ids``: the prompt is token ids, not embeddings.

    Raises:
        ValueError: the logprobs start after the end of the prompt, or the prompt has no token ids.
        RequestTooLargeError: there would be too many logprobs.
    """
    if rules.start >= 0 and not has_ids:
        raise ValueError(f"logprob_start_len={rules.start} needs token ids, and input_embeds has none; leave it out")
    if rules.start > num_prompt_tokens:
        raise checks.wrong_value(
            "logprob_start_len", f"at most {num_prompt_tokens}, the tokens of the prompt", rules.start
        )
    for what, num_positions, limit in (
        ("prompt", rules.num_prompt_positions(num_prompt_tokens), MAX_PROMPT_VALUES),
        ("output", num_output, MAX_OUTPUT_VALUES),
    ):
        if num_positions * rules.num_values > limit:
            raise RequestTooLargeError(
                f"{rules.num_values} logprobs at each of {num_positions} {what} tokens are more than {limit:,}; lower "
                "top_logprobs_num, or " + ("raise logprob_start_len" if what == "prompt" else "max_new_tokens")
            )

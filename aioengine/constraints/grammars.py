"""Grammars: compiled in threads, cached by their text, and followed token by token, with the llguidance library.

A grammar is compiled once, in a thread, while steps run. Each request follows its own copy. Limits on states, items and
work bound the time and the memory of both. Beyond them, a grammar is refused, or its request fails alone. llguidance
is imported and the tokenizer is read when the engine is idle, or when the first grammar arrives.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from functools import cached_property, partial
from threading import Event, Lock
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from aioengine.api import checks
from aioengine.constraints.lark import checked_lark, lark_names, with_short_escapes
from aioengine.constraints.tag_grammar import TOKEN
from aioengine.constraints.token_source import SPECIAL, TokenSource, token_bytes
from aioengine.model_files.vocabulary import end_ids
from aioengine.protocol.messages import Grammar
from aioengine.settings.machine import num_threads
from aioengine.text.token_table import read_token_table

if TYPE_CHECKING:
    from llguidance import TokenizerWrapper

Words = npt.NDArray[np.int32]

MAX_CACHED_BYTES: Final = 256 * 1024 * 1024
BYTES_PER_GRAMMAR: Final = 65_536
BYTES_PER_CHARACTER: Final = 256
"""Upper estimate of the memory of a compiled grammar: 70 times its text for enums, 170 for optional properties."""

QUIET_S: Final = 1.0
"""Each part of the preparation starts after this time without a running request, and keeps the GIL for 0.1 to 0.4 s."""
_POLL_S: Final = 0.1

_MIN_COMPILERS: Final = 2
_MAX_COMPILERS: Final = 8
_MAX_MASK_THREADS: Final = 4
"""With more threads, waking them takes longer than they save: 256 masks take a millisecond."""
_MIN_IN_BACKGROUND: Final = 16
"""Minimum number of masks that are computed in another thread."""
_REQUESTS_PER_TEMPLATE: Final = 24
"""Copies of a template share a lexer with one lock, so their masks are computed one after the other. If a grammar has
more active requests, it is compiled again."""

_SLICES: Final = (
    *(f"[a-z0-9]{{1,{length}}}" for length in (4, 10)),
    *(rf'[^"\\\x00-\x1F\x7F]{{1,{length}}}' for length in (4, 10, 30)),
    r'[^"\\\x00-\x1F\x7F]+',
)
"""Sets of tokens that are allowed together if a grammar allows all texts that match the pattern, so that llguidance
does not look at each token. Short patterns are for the end of strings with a ``maxLength``, letters are for patterns.
Each one makes compiling slower."""

_MASK_FUEL: Final = 100_000
"""Maximum work for one mask, about 7 ms, in the unit of llguidance."""

_MAX_ITEMS: Final = 500
_MAX_MASK_ITEMS: Final = 2000
"""Maximum items of the parser for ``ebnf``. The time of a token grows with the cube of the first limit, the time of a
mask also with the second. Ambiguous grammars have many items; the other kinds of grammars are compiled to have few."""

_MAX_STATES: Final = 60_000
"""Maximum states of the lexer of a request, up to 40 MB."""

_MAX_TAIL: Final = 4096
_SPACES: Final = b" \t\r\n"


class _Vocabulary(NamedTuple):
    """The vocabulary of the model.

    tokens: the bytes of each token; special tokens have llguidance's mark and their text. tokenizer: llguidance's.
    encode: tokenizes a text.
    """

    tokens: list[bytes]
    tokenizer: Any
    encode: Callable[[str], list[int]]


class Thinking:
    """The tokens before the constraint begins: any tokens except end-of-text, until the text ends with ``end``.

    Spaces after ``end`` are ignored. After ``max_tokens`` tokens, the tokens of ``end`` are forced.
    """

    def __init__(self, end: bytes, end_ids: Sequence[int], *, max_tokens: int | None) -> None:
        self._end = end
        self._end_ids = end_ids
        self._left = max_tokens
        self._forced = 0
        self._tail = b""

    def push(self, text: bytes) -> bool:
        """Add the text of the next token. Return whether it is the last one."""
        if self._left == 0:
            self._forced += 1
        elif self._left is not None:
            self._left -= 1
        self._tail = (self._tail + text)[-_MAX_TAIL:]
        return self._forced == len(self._end_ids) or _ends_with(self._tail, self._end)

    def fill(self, words: Words, eos_token_ids: Sequence[int]) -> None:
        """Write the allowed tokens as bits to words [ceil(V / 32)]."""
        if self._left == 0:
            words.fill(0)
            _set(words, self._end_ids[self._forced])
            return
        words.fill(-1)
        for token_id in eos_token_ids:
            _clear(words, token_id)


class Constraint:
    """The position of a request in its grammar.

    Attributes:
        source: computes its masks.
        is_complete: no token is allowed any more.
        error: the reason why the grammar cannot be followed any further, or empty.
        forced: the next tokens, if no others are allowed.
        num_forced: how many of them the request has already; llguidance receives all of them after the last.
        next_token: the only allowed token; -1: the mask has the allowed tokens.
    """

    def __init__(
        self, source: Grammars, grammar: Grammar, template: _Template, tokens: list[bytes], *, thinking: Thinking | None
    ) -> None:
        self.source = source
        self.grammar = grammar
        self.template = template
        self.matcher: Any = template.matcher.result().deep_copy()
        self.thinking = thinking
        self.is_complete = False
        self.error = ""
        self.tokens = tokens
        self.forced: list[int] = self.matcher.compute_ff_tokens()
        self.num_forced = 0
        self.next_token = self.forced[0] if self.forced and thinking is None else -1

    def advance(self, token_id: int) -> None:
        """Follow the next token of the request."""
        if self.thinking is not None:
            if self.thinking.push(_text_of(self.tokens, [token_id])):
                self.thinking = None
                self.next_token = self.forced[0] if self.forced else -1
            return
        if token_id == self.next_token and self.num_forced + 1 < len(self.forced):
            self.num_forced += 1
            self.next_token = self.forced[self.num_forced]
        else:
            self._consume([*self.forced[: self.num_forced], token_id])

    def take_forced(self, at_least: int, at_most: int) -> list[int]:
        """Follow and return up to ``at_most`` forced tokens, or none if there are fewer than ``at_least``."""
        if len(self.forced) - self.num_forced < at_least or at_most < at_least or self.thinking is not None:
            return []
        taken = self.forced[self.num_forced : self.num_forced + at_most]
        self.num_forced += len(taken)
        if self.num_forced == len(self.forced):
            self._consume(self.forced)
        else:
            self.next_token = self.forced[self.num_forced]
        return taken

    def copy(self) -> Constraint:
        """Return a copy that advances on its own."""
        copied = copy(self)
        copied.matcher = self.matcher.deep_copy()
        copied.thinking = copy(self.thinking)
        return copied

    def _consume(self, token_ids: list[int]) -> None:
        if self.matcher.consume_tokens(token_ids):
            self.is_complete = self.matcher.is_stopped()
            # In this thread: threads of llguidance would wait for the GIL, because Python tokenizes forced text.
            self.forced = [] if self.is_complete else self.matcher.compute_ff_tokens()
            self.num_forced = 0
            self.next_token = self.forced[0] if self.forced else -1
        else:
            self.fail()

    def fail(self) -> None:
        """Set ``error`` to the error of llguidance."""
        self.error = f"{self.grammar.parameter} cannot be followed any further: {_why(self.matcher)}"

    @property
    def is_over(self) -> bool:
        return self.is_complete or bool(self.error)


class _Template:
    """A compiled grammar.

    matcher: llguidance's matcher at the start of the grammar. live: the constraints that share its lexer. is_spent: a
    constraint failed, so the lexer may be full. New constraints use another template as soon as it is compiled.
    """

    def __init__(self, matcher: Future[Any]) -> None:
        self.matcher = matcher
        self.is_spent = False
        self.live: WeakSet[Constraint] = WeakSet()


class Turns:
    """Runs calls in threads. Tenants take turns, so many calls of one tenant do not delay other tenants."""

    def __init__(self, num_threads: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="grammar")
        self._lock = Lock()
        self._waiting: OrderedDict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = OrderedDict()

    def submit(self, tenant: str, call: Callable[[], Any]) -> Future[Any]:
        """Queue a call and return its future. ``cancel`` works until the call starts."""
        future: Future[Any] = Future()
        with self._lock:
            self._waiting.setdefault(tenant, deque()).append((future, call))
        self._threads.submit(self._run_next)
        return future

    def _run_next(self) -> None:
        with self._lock:
            tenant, calls = self._waiting.popitem(last=False)
            future, call = calls.popleft()
            if calls:
                self._waiting[tenant] = calls  # after the other tenants
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class Grammars:
    """The grammars of an engine.

    Attributes:
        needed: returns the kind and the text of each grammar that a request will open. These grammars stay cached.
    """

    def __init__(self, tokenizer_path: str | None, vocab_size: int, eos_token_ids: Sequence[int] = ()) -> None:
        """vocab_size, eos_token_ids: from the model."""
        self.num_words = -(-vocab_size // 32)
        self.needed: Callable[[], Collection[tuple[str, str]]] = tuple
        self._tokenizer_path = tokenizer_path
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._quiet_since: float | None = None
        self._is_quiet = False
        self._is_needed = Event()  # a request waits for the vocabulary
        self._prepared: Future[None] | None = None
        self._lock = Lock()
        self._vocabulary: _Vocabulary | None = None
        self._num_computed = self.num_words  # words of llguidance's masks
        self._compiled: OrderedDict[tuple[str, str], list[_Template]] = OrderedDict()
        self._num_bytes = 0
        num_cores = max(1, num_threads() // 2)
        self._num_mask_threads = min(_MAX_MASK_THREADS, num_cores)
        self._compilers = Turns(max(_MIN_COMPILERS, min(_MAX_COMPILERS, num_cores)))
        self._mask_thread = ThreadPoolExecutor(1, thread_name_prefix="masks")

    def prepare_when_quiet(self, now: float, *, is_busy: bool) -> None:
        """Prepare for the first grammar in a thread, after ``QUIET_S`` without a running request. Called often."""
        if is_busy or self._quiet_since is None:
            self._quiet_since = now
        self._is_quiet = now - self._quiet_since >= QUIET_S
        if self._is_quiet and self._prepared is None and self._tokenizer_path is not None:
            self._prepared = self._compilers.submit("", self._prepare)

    @property
    def is_prepared(self) -> bool:
        """Whether the vocabulary is read, so that the first grammar takes no longer than others."""
        return self._vocabulary is not None

    def _prepare(self) -> None:
        self._read_vocabulary(None)
        self._compile(Grammar("regex", "a"))
        self._executor  # noqa: B018  # its threads

    def _wait_until_quiet(self) -> None:
        """Return when no request runs, or a request waits for the vocabulary."""
        while not (self._is_quiet or self._is_needed.wait(_POLL_S)):
            pass

    def compile(self, grammar: Grammar, tenant: str = "") -> Future[Any]:
        """Compile a grammar that is not cached. The future raises ValueError if it cannot be compiled."""
        return next(template.matcher for template in self._templates(grammar, tenant) if not template.is_spent)

    def leave(self, compiled: Future[Any]) -> None:
        """Cancel compiling a grammar, unless it has started, because no request waits for it."""
        if compiled.cancel():
            for key, templates in list(self._compiled.items()):
                self._keep(key, [template for template in templates if template.matcher is not compiled])

    def open(self, grammar: Grammar, token_ids: Sequence[int], num_prompt: int) -> Constraint:
        """Return the constraint of a request with these tokens: prompt, then output.

        Raises:
            ValueError: the grammar cannot be compiled, or the output does not match it.
        """
        templates = self._templates(grammar)
        compiled = [template for template in templates if template.matcher.done()] or templates
        template = min(compiled, key=lambda template: (template.is_spent, len(template.live)))
        vocabulary = self._read_vocabulary(grammar.eos_token_ids)
        thinking = self._thinking(grammar, vocabulary, token_ids[:num_prompt])
        constraint = Constraint(self, grammar, template, vocabulary.tokens, thinking=thinking)
        template.live.add(constraint)
        is_crowded = len(template.live) > _REQUESTS_PER_TEMPLATE and len(templates) < self._num_mask_threads
        if is_crowded and templates[-1].matcher.done():
            self._add_template(grammar, templates, tenant="")
        for token_id in token_ids[num_prompt:]:
            constraint.advance(token_id)
        return constraint

    def fill(self, constraints: Sequence[Constraint], masks: Words) -> None:
        """Write the allowed tokens as bits to masks [constraints, num_words].

        constraints: not over, and with several allowed tokens.
        """
        self.begin(constraints, masks, in_background=False)()

    def begin(
        self, constraints: Sequence[Constraint], masks: Words, *, in_background: bool = True
    ) -> Callable[[], None]:
        """Do the same as ``fill``, with many masks in another thread. Call the result to wait for the end. Until then,
        no constraint of these grammars may advance.
        """
        computed: list[tuple[Constraint, int]] = []
        for row, constraint in enumerate(constraints):
            if constraint.thinking is not None:
                constraint.thinking.fill(masks[row], constraint.grammar.eos_token_ids)
            else:
                computed.append((constraint, row))
        # Copies of a template share a lock: give them to one thread.
        computed.sort(key=lambda entry: id(entry[0].template))
        matchers = [(constraint.matcher, row) for constraint, row in computed]
        thread: Future[None] | None = None
        if in_background and len(constraints) >= _MIN_IN_BACKGROUND:
            has_begun = Event()
            thread = self._mask_thread.submit(self._compute, matchers, masks, has_begun)
            has_begun.wait()  # otherwise that thread would wait up to 5 ms for the GIL
        else:
            self._compute(matchers, masks)

        def finish() -> None:
            if thread is not None:
                thread.result()
            for constraint, row in computed:
                if constraint.matcher.is_error():
                    constraint.fail()
                    constraint.template.is_spent = True
                elif constraint.grammar.ignore_eos:
                    _clear_where_possible(masks[row], constraint.grammar.eos_token_ids)

        return finish

    def _compute(self, matchers: list[tuple[Any, int]], masks: Words, has_begun: Event | None = None) -> None:
        if has_begun is not None:
            has_begun.set()
        if not matchers:
            return
        wide = masks if self._num_computed == self.num_words else np.zeros((len(masks), self._num_computed), np.int32)
        self._executor.unsafe_compute_mask_ptr(matchers, wide.ctypes.data, wide.strides[0], len(wide))
        for _, row in matchers if wide is not masks else ():
            masks[row] = wide[row, : self.num_words]

    def close(self) -> None:
        self._is_needed.set()
        self._compilers.close()
        self._mask_thread.shutdown(wait=False)

    # ------------------------------------------------------------ compiling

    @cached_property
    def _executor(self) -> Any:
        import llguidance  # slow to import, and most programs give no grammar

        return llguidance.LLExecutor(self._num_mask_threads)

    def _compile(self, grammar: Grammar) -> Any:
        from llguidance import LLMatcher, LLParserLimits
        from llguidance.gbnf_to_lark import RepetitionNode, any_to_lark

        vocabulary = self._read_vocabulary(grammar.eos_token_ids)
        text = grammar.text
        if grammar.kind == "regex":
            text = LLMatcher.grammar_from_regex(text)
        elif grammar.kind == "ebnf":
            try:
                RepetitionNode.is_atomic = lambda _: False  # type: ignore[method-assign]  # it would write (x+)? as x+?
                lark = any_to_lark(with_short_escapes(text))
            except Exception as error:  # of any type, from the parser
                raise ValueError(f"it is neither GBNF nor Lark: {checks.cut(str(error))}") from error
            text = LLMatcher.grammar_from_lark(checked_lark(lark, lark_names(text)))
        elif grammar.kind == "lark":
            text = _with_token_ids(text, vocabulary.tokens)
        limits = LLParserLimits(
            step_lexer_fuel=_MASK_FUEL,
            max_lexer_states=_MAX_STATES,
            max_items_in_row=_MAX_ITEMS if grammar.kind == "ebnf" else None,
            step_max_items=_MAX_MASK_ITEMS if grammar.kind == "ebnf" else None,
            verbose_errors=False,
        )
        matcher = LLMatcher(vocabulary.tokenizer, text, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # fails if no text matches, and prepares the lexer for the first tokens
        if matcher.is_error():
            raise ValueError(_why(matcher))
        return matcher

    def _templates(self, grammar: Grammar, tenant: str = "") -> list[_Template]:
        """Return the templates of a grammar. At least one is not spent; if there is none, start to compile it."""
        key = grammar.kind, grammar.text
        templates = self._compiled.setdefault(key, [])
        self._compiled.move_to_end(key)
        usable = [template for template in templates if not template.is_spent]
        if not usable:
            self._add_template(grammar, templates, tenant)
        elif usable[0].matcher.done():
            self._keep(key, usable)
        return templates

    def _add_template(self, grammar: Grammar, templates: list[_Template], tenant: str) -> None:
        templates.append(_Template(self._compilers.submit(tenant, partial(self._compile, grammar))))
        self._num_bytes += _num_bytes(grammar.text)
        if self._num_bytes <= MAX_CACHED_BYTES:
            return
        needed = self.needed()
        for key, cached in list(self._compiled.items())[:-1]:
            if self._num_bytes <= MAX_CACHED_BYTES:
                return
            if key not in needed and all(template.matcher.done() for template in cached):
                self._keep(key, [])

    def _keep(self, key: tuple[str, str], kept: list[_Template]) -> None:
        """Drop the other templates of a grammar."""
        templates = self._compiled[key]
        self._num_bytes -= _num_bytes(key[1]) * (len(templates) - len(kept))
        templates[:] = kept
        if not kept:
            del self._compiled[key]

    # ------------------------------------------------------------ the vocabulary

    def _read_vocabulary(self, eos_token_ids: Sequence[int] | None) -> _Vocabulary:
        """Return the vocabulary. eos_token_ids: of a request; None: of the model, before the first request."""
        if eos_token_ids is not None:
            self._is_needed.set()
        with self._lock:
            self._vocabulary = self._vocabulary or self._make_vocabulary(eos_token_ids)
            return self._vocabulary

    def _make_vocabulary(self, eos_token_ids: Sequence[int] | None) -> _Vocabulary:
        from llguidance import LLTokenizer

        from aioengine.tokenization.tokenizer import Tokenizer

        if self._tokenizer_path is None:
            raise ValueError("this engine has no tokenizer, which structured output needs")
        self._wait_until_quiet()
        own = Tokenizer(self._tokenizer_path)
        if eos_token_ids is None:
            eos_token_ids = end_ids(self._eos_token_ids, own.eos_token_id, self._vocab_size)
        self._wait_until_quiet()
        facts = own.decoding_facts()
        table = read_token_table(facts, skip_special_tokens=False)
        if table is None:
            raise ValueError("the tokenizer of this model changes its text, so no grammar can follow it")
        special = {token["id"] for token in facts["added_tokens"] if token["special"]} | set(eos_token_ids)
        tokens = [token_bytes(table[token_id], is_special=token_id in special) for token_id in range(self._vocab_size)]
        ends = [token_id for token_id in eos_token_ids if token_id < len(tokens)]
        known = tokens if ends else [*tokens, SPECIAL + b"end"]  # llguidance needs an end-of-text token
        self._num_computed = -(-len(known) // 32)
        encode = partial(own.encode, add_special_tokens=False)
        source = TokenSource(known, special, ends or [len(tokens)], encode)
        self._wait_until_quiet()
        tokenizer = LLTokenizer(cast("TokenizerWrapper", source), eos_token=source.eos_token_ids, slices=list(_SLICES))
        return _Vocabulary(tokens, tokenizer, encode)

    def _thinking(self, grammar: Grammar, vocabulary: _Vocabulary, prompt: Sequence[int]) -> Thinking | None:
        """Return the thinking before the grammar; None: there is none, or it ended in the prompt."""
        end = grammar.reasoning_end
        if not end:
            return None
        ids = vocabulary.encode(end) if isinstance(end, str) else end
        text = end.encode() if isinstance(end, str) else _text_of(vocabulary.tokens, end)
        text = text.rstrip(_SPACES) or text
        tail = _text_of(vocabulary.tokens, prompt[-len(text) - 64 :])
        return None if _ends_with(tail, text) else Thinking(text, ids, max_tokens=grammar.max_thinking_tokens)


def _with_token_ids(text: str, tokens: list[bytes]) -> str:
    """Replace the special tokens in a grammar by their ids. A token that the model does not have stays a text."""

    def rule(match: re.Match[str]) -> str:
        data = token_bytes(json.loads(match[2]), is_special=True)
        return match[1] + (f"<[{tokens.index(data)}]>" if data in tokens else match[2])

    return re.sub(rf'^(\w+: ){TOKEN} (".*")$', rule, text, flags=re.MULTILINE)


def _why(matcher: Any) -> str:
    """Return the reason why a matcher failed."""
    error: str = matcher.get_error().removesuffix("<non-verbose/>").strip()
    if error == "NoExtensionBias":
        return "no text fits it: a part of it, such as an empty class, matches nothing"
    if "nsatisfiable" in error:
        place = re.search(r"required property '.*?'", error)
        part = checks.cut(place[0]) if place else "it"
        return f"no value fits {part}: keywords contradict each other, or a pattern fits no text"
    if "ff_tokens" in error:
        return "the next text has no alternatives and too many parts; join its parts to longer literals"
    if re.search("fuel|limit|items|[tT]oo (?:many|big|large)", error):
        return "it takes more work than is allowed; make it smaller, with fewer repetitions or alternatives"
    return checks.cut(error)


def _text_of(tokens: list[bytes], token_ids: Sequence[int]) -> bytes:
    """Return the text of tokens, without llguidance's mark of special tokens."""
    return b"".join(tokens[token_id].removeprefix(SPECIAL) for token_id in token_ids)


def _ends_with(text: bytes, end: bytes) -> bool:
    """Return whether ``text`` ends with ``end``. Spaces after it are ignored, unless ``end`` is only spaces."""
    return (text if end.isspace() else text.rstrip(_SPACES)).endswith(end)


def _num_bytes(text: str) -> int:
    return BYTES_PER_GRAMMAR + BYTES_PER_CHARACTER * len(text)


def _set(words: Words, token_id: int) -> None:
    words[token_id >> 5] |= np.uint32(1 << (token_id & 31)).view(np.int32)


def _clear(words: Words, token_id: int) -> None:
    words[token_id >> 5] &= ~np.uint32(1 << (token_id & 31)).view(np.int32)


def _clear_where_possible(words: Words, token_ids: Sequence[int]) -> None:
    """Exclude tokens from words [ceil(V / 32)], unless no other token is allowed."""
    kept = words.copy()
    for token_id in token_ids:
        _clear(kept, token_id)
    if kept.any():
        words[:] = kept

"""Grammars: compiled in threads, kept by their text, and followed token by token, with the llguidance library.

A grammar is compiled once, in a thread that runs beside the steps; each request follows a copy of its own. The library
bounds the time and memory of both by limits on states, items and work, beyond which a grammar is refused or a request
fails alone. The library is imported and the tokenizer read once the engine is quiet, or when the first grammar comes.
"""

from __future__ import annotations

import re
from collections import OrderedDict, deque
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from operator import itemgetter
from threading import Event, Lock
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast
from weakref import WeakSet

import numpy as np

from aioengine.api import checks
from aioengine.constraints.gbnf import convertible
from aioengine.constraints.lark import checked_lark
from aioengine.constraints.token_source import SPECIAL, TokenSource, token_bytes
from aioengine.errors import UnsupportedSchemaError
from aioengine.model_files.vocabulary import end_ids
from aioengine.protocol.messages import Grammar
from aioengine.settings.machine import num_threads
from aioengine.text.token_table import TokenizerFile, read_token_table

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    import numpy.typing as npt
    from llguidance import TokenizerWrapper

    Words = npt.NDArray[np.int32]

MAX_CACHED_BYTES: Final = 256 * 1024 * 1024
BYTES_PER_GRAMMAR: Final = 65_536
BYTES_PER_CHARACTER: Final = 256
"""The memory of a compiled grammar, rather too much: 70 times its text for enums, 170 times for optional properties."""

QUIET_S: Final = 1.0
"""A part of the preparation begins after this time without a running request: parts hold the GIL for 0.1 to 0.4 s."""
_POLL_S: Final = 0.1

_MIN_COMPILERS: Final = 2
_MAX_COMPILERS: Final = 8
_MAX_MASK_THREADS: Final = 4
"""More of them wake later than they help: 256 masks take a millisecond, beside the work of the scheduler."""
_MIN_BESIDE: Final = 16
"""Masks that are worth the change of threads."""
_REQUESTS_PER_TEMPLATE: Final = 24
"""The copies of a template read characters with one lexer behind one lock, so that their masks are computed one after
the other. A grammar of more requests at a time is compiled again."""

_SLICES: Final = (
    *(f"[a-z0-9]{{1,{length}}}" for length in (4, 10)),
    *(rf'[^"\\\x00-\x1F\x7F]{{1,{length}}}' for length in (4, 10, 30)),
    r'[^"\\\x00-\x1F\x7F]+',
)
"""Sets of tokens that are allowed as a whole where a grammar allows all texts of this kind. The short ones are for the
ends of strings with a ``maxLength``, the plain letters for patterns; elsewhere most of the vocabulary would be read.
Each adds to the time in which a grammar is compiled."""

_MASK_FUEL: Final = 100_000
"""The library's measure of work for one mask, about 7 ms."""

_MAX_ITEMS: Final = 500
_MAX_MASK_ITEMS: Final = 2000
"""Of what may come next in an ``ebnf``: the time of a token grows with the cube of the first, that of a mask with the
second, too. Texts that can be read in many ways have many; other kinds of grammars are made so that they have few."""

_MAX_STATES: Final = 60_000
"""Of what reads the characters of a request, up to 40 MB."""

_MAX_TAIL: Final = 4096
_SPACES: Final = b" \t\r\n"


class GrammarError(UnsupportedSchemaError):
    """A grammar cannot be compiled, or the output cannot follow it any further."""


class _Vocabulary(NamedTuple):
    """The bytes of each token; of special ones the library's mark and their text. tokenizer: of the library. encode:
    from text to token ids.
    """

    tokens: list[bytes]
    tokenizer: Any
    encode: Callable[[str], list[int]]


class Thinking:
    """The tokens before the constraint begins: any but the end of the text, until ``end`` was written.

    It ends with a token behind which the text ends with ``end``, spaces aside. When no tokens are left, those of
    ``end`` are forced.
    """

    def __init__(self, end: bytes, end_ids: Sequence[int], *, max_tokens: int | None) -> None:
        self._end = end
        self._end_ids = end_ids
        self._left = max_tokens
        self._forced = 0
        self._tail = b""

    def push(self, text: bytes) -> bool:
        """The next token has this text. Whether it is the last one."""
        if self._left == 0:
            self._forced += 1
        elif self._left is not None:
            self._left -= 1
        self._tail = (self._tail + text)[-_MAX_TAIL:]
        return self._forced == len(self._end_ids) or _ends_with(self._tail, self._end)

    def fill(self, words: Words, eos_token_ids: Sequence[int]) -> None:
        """The tokens that are allowed next, as bits of words [ceil(V / 32)]."""
        if self._left == 0:
            words.fill(0)
            _set(words, self._end_ids[self._forced])
            return
        words.fill(-1)
        for token_id in eos_token_ids:
            _clear(words, token_id)


class Constraint:
    """What one request has followed of its grammar.

    Attributes:
        source: computes its masks. is_complete: no further token is allowed. error: why it cannot be followed any
            further; empty while it can. forced: the next tokens where no others are allowed, ``num_forced`` of which
            the request has; the library follows them together. next_token: the only one that is allowed next; -1 where
            its mask says which are.
    """

    __slots__ = (
        "__weakref__", "error", "forced", "grammar", "is_complete", "matcher", "next_token", "num_forced", "source",
        "template", "thinking", "tokens",
    )  # fmt: skip

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
        """The request has this token next."""
        if self.thinking is not None:
            if self.thinking.push(self.tokens[token_id]):
                self.thinking = None
                self.next_token = self.forced[0] if self.forced else -1
            return
        new = [token_id]
        if self.forced:
            self.num_forced += 1
            if token_id == self.next_token:
                if self.num_forced < len(self.forced):
                    self.next_token = self.forced[self.num_forced]
                    return
                new = self.forced
            else:
                new = [*self.forced[: self.num_forced - 1], token_id]
        self._consume(new)

    def take_forced(self, at_least: int, at_most: int) -> list[int]:
        """The next tokens where no others are allowed, which the request has then; none if there are fewer."""
        if len(self.forced) - self.num_forced < at_least or at_most < at_least or self.thinking is not None:
            return []
        taken = self.forced[self.num_forced : self.num_forced + at_most]
        self.num_forced += len(taken)
        if self.num_forced == len(self.forced):
            self._consume(self.forced)
        else:
            self.next_token = self.forced[self.num_forced]
        return taken

    def _consume(self, token_ids: list[int]) -> None:
        if self.matcher.consume_tokens(token_ids):
            self.is_complete = self.matcher.is_stopped()
            # In this thread: threads of the library would wait for Python, which tokenizes what is forced.
            self.forced = [] if self.is_complete else self.matcher.compute_ff_tokens()
            self.num_forced = 0
            self.next_token = self.forced[0] if self.forced else -1
        else:
            self.error = f"{self.grammar.parameter}: token {token_ids[-1]} does not fit: {_why(self.matcher)}"

    @property
    def is_over(self) -> bool:
        return self.is_complete or bool(self.error)


class _Template:
    """A compiled grammar. matcher: of the library, at the beginning. live: the constraints that share its lexer.
    is_spent: one of them failed, and the lexer may be full: new ones go to another template once there is one.
    """

    def __init__(self, matcher: Future[Any]) -> None:
        self.matcher = matcher
        self.is_spent = False
        self.live: WeakSet[Constraint] = WeakSet()


class Turns:
    """Calls in threads, of each tenant in turn: one with many calls does not delay those of others."""

    def __init__(self, num_threads: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="grammar")
        self._lock = Lock()
        self._waiting: OrderedDict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = OrderedDict()

    def submit(self, tenant: str, call: Callable[[], Any]) -> Future[Any]:
        """Its result or exception; ``cancel`` keeps a call from beginning."""
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
                self._waiting[tenant] = calls  # behind the other tenants
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
        needed: returns the kind and text of those that requests will open: they stay, however large they are.
    """

    def __init__(self, tokenizer_path: str | None, vocab_size: int, eos_token_ids: Sequence[int] = ()) -> None:
        """``vocab_size``, ``eos_token_ids``: of the model."""
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
        self._num_computed = self.num_words  # words of the library's masks
        self._compiled: OrderedDict[tuple[str, str], list[_Template]] = OrderedDict()
        self._num_bytes = 0
        self._num_threads = max(1, num_threads() // 2)
        self._num_mask_threads = min(_MAX_MASK_THREADS, self._num_threads)

    def prepare_when_quiet(self, now: float, *, is_busy: bool) -> None:
        """Prepare for the first grammar in a thread, after ``QUIET_S`` without a running request.

        The loop of the process calls this in every round.
        """
        if is_busy or self._quiet_since is None:
            self._quiet_since = now
        self._is_quiet = now - self._quiet_since >= QUIET_S
        if self._is_quiet and self._prepared is None and self._tokenizer_path is not None:
            self._prepared = self._compilers.submit("", self._prepare)

    @property
    def is_prepared(self) -> bool:
        """Whether the vocabulary is read. Then the first grammar takes no longer than any other."""
        return self._vocabulary is not None

    def _prepare(self) -> None:
        self._read_vocabulary(None)
        self._compile(Grammar("regex", "a"))
        self._executor  # noqa: B018  # its threads

    def _wait_until_quiet(self) -> None:
        """Return once nothing runs, or a request waits for the vocabulary."""
        while not (self._is_quiet or self._is_needed.wait(_POLL_S)):
            pass

    def compile(self, grammar: Grammar, tenant: str = "") -> Future[Any]:
        """Begin to compile a grammar that is not there yet. The future raises GrammarError where that fails."""
        return next(each.matcher for each in self._templates(grammar, tenant) if not each.is_spent)

    def leave(self, compiled: Future[Any]) -> None:
        """Nobody waits for this grammar any more: do not compile it, unless that has begun."""
        if compiled.cancel():
            found = ((key, each) for key, templates in self._compiled.items() for each in templates)
            key, left = next((key, each) for key, each in found if each.matcher is compiled)
            self._keep(key, [each for each in self._compiled[key] if each is not left])

    def open(self, grammar: Grammar, token_ids: Sequence[int], num_prompt: int) -> Constraint:
        """Follow a grammar from its beginning, behind the tokens of the request: prompt, then output.

        Raises:
            GrammarError: it cannot be compiled, or the output does not fit it.
        """
        templates = self._templates(grammar)
        compiled = [each for each in templates if each.matcher.done()] or templates
        template = min(compiled, key=lambda each: (each.is_spent, len(each.live)))
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
        """The tokens that each may have next, as bits of masks [constraints, num_words]; none where it has an error."""
        matchers, known = _sorted(constraints)
        if matchers:
            self._compute(matchers, masks)
        _fill_known(known, masks)
        self._check(constraints, masks, matchers)

    def begin(self, constraints: Sequence[Constraint], masks: Words) -> Callable[[], None]:
        """As ``fill``, in another thread. What is returned waits for its end and must be called: until then, neither
        the constraints nor others of their grammars advance.
        """
        if len(constraints) < _MIN_BESIDE:
            self.fill(constraints, masks)
            return lambda: None
        matchers, known = _sorted(constraints)
        has_begun = Lock()
        has_begun.acquire()

        def compute() -> None:
            has_begun.release()
            if matchers:
                self._compute(matchers, masks)

        computed = self._beside.submit(compute)
        has_begun.acquire()  # else that thread would wait for this one to leave Python, for 5 ms
        _fill_known(known, masks)

        def wait() -> None:
            computed.result()
            self._check(constraints, masks, matchers)

        return wait

    def _compute(self, matchers: list[tuple[Any, int]], masks: Words) -> None:
        wide = masks if self._num_computed == self.num_words else np.zeros((len(masks), self._num_computed), np.int32)
        self._executor.unsafe_compute_mask_ptr(matchers, wide.ctypes.data, wide.strides[0], len(wide))
        for _, row in matchers if wide is not masks else ():
            masks[row] = wide[row, : self.num_words]

    def _check(self, constraints: Sequence[Constraint], masks: Words, matchers: list[tuple[Any, int]]) -> None:
        """Read from the library what has failed, and rule out the end of the text where that is wanted."""
        for matcher, row in matchers:
            constraint = constraints[row]
            if matcher.is_error():
                why = _why(matcher)
                constraint.error = f"{constraint.grammar.parameter} cannot be followed any further: {why}"
                constraint.template.is_spent = True
            elif constraint.grammar.ignore_eos:
                _clear_where_possible(masks[row], constraint.grammar.eos_token_ids)

    def close(self) -> None:
        self._is_needed.set()
        self._compilers.close()
        self._beside.shutdown(wait=False)

    # ------------------------------------------------------------ compiling

    @cached_property
    def _compilers(self) -> Turns:
        return Turns(max(_MIN_COMPILERS, min(_MAX_COMPILERS, self._num_threads)))

    @cached_property
    def _beside(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="masks")

    @cached_property
    def _executor(self) -> Any:
        import llguidance  # slow to import, and most programs give no grammar

        return llguidance.LLExecutor(self._num_mask_threads)

    def _compile(self, grammar: Grammar) -> Any:
        from llguidance import LLMatcher, LLParserLimits
        from llguidance.gbnf_to_lark import any_to_lark

        tokenizer = self._read_vocabulary(grammar.eos_token_ids).tokenizer
        text = grammar.text
        if grammar.kind == "regex":
            text = LLMatcher.grammar_from_regex(text)
        elif grammar.kind == "ebnf":
            try:
                text = any_to_lark(convertible(text))
            except Exception as error:  # whatever its parser in Python meets
                raise GrammarError(f"it is read neither as GBNF nor as Lark: {checks.cut(str(error))}") from error
            try:
                text = checked_lark(text)
            except UnsupportedSchemaError as error:
                message = f"in the schema behind its %json, {checks.cut(str(error))}"
                raise GrammarError(message, pointer=error.pointer, keyword=error.keyword) from error
            except ValueError as error:
                raise GrammarError(checks.cut(str(error))) from error
            text = LLMatcher.grammar_from_lark(text)
        limits = LLParserLimits(
            step_lexer_fuel=_MASK_FUEL,
            max_lexer_states=_MAX_STATES,
            max_items_in_row=_MAX_ITEMS if grammar.kind == "ebnf" else None,
            step_max_items=_MAX_MASK_ITEMS if grammar.kind == "ebnf" else None,
            verbose_errors=False,
        )
        matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # which fails where no text fits, and readies the lexer for the first tokens
        if matcher.is_error():
            raise GrammarError(_why(matcher))
        return matcher

    def _templates(self, grammar: Grammar, tenant: str = "") -> list[_Template]:
        """Those of a grammar, one of which is not spent; it is compiled from now on if there was none."""
        key = _key(grammar)
        found = self._compiled.setdefault(key, [])
        self._compiled.move_to_end(key)
        usable = [each for each in found if not each.is_spent]
        if not usable:
            self._add_template(grammar, found, tenant)
        elif usable[0].matcher.done():
            self._keep(key, usable)
        return found

    def _add_template(self, grammar: Grammar, templates: list[_Template], tenant: str) -> None:
        templates.append(_Template(self._compilers.submit(tenant, partial(self._compile, grammar))))
        self._num_bytes += _num_bytes(_key(grammar))
        self._make_room()

    def _make_room(self) -> None:
        if self._num_bytes <= MAX_CACHED_BYTES:
            return
        needed = self.needed()
        for key, templates in list(self._compiled.items())[:-1]:
            if self._num_bytes <= MAX_CACHED_BYTES:
                return
            if key not in needed and all(each.matcher.done() for each in templates):
                self._keep(key, [])

    def _keep(self, key: tuple[str, str], kept: list[_Template]) -> None:
        """These of the templates of a grammar."""
        templates = self._compiled[key]
        self._num_bytes -= _num_bytes(key) * (len(templates) - len(kept))
        templates[:] = kept
        if not kept:
            del self._compiled[key]

    # ------------------------------------------------------------ the vocabulary

    def _read_vocabulary(self, eos_token_ids: Sequence[int] | None) -> _Vocabulary:
        """Return the vocabulary. ``eos_token_ids``: of a request; None: of the model, before the first request."""
        if eos_token_ids is not None:
            self._is_needed.set()
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._make_vocabulary(eos_token_ids)
            return self._vocabulary

    def _make_vocabulary(self, eos_token_ids: Sequence[int] | None) -> _Vocabulary:
        from llguidance import LLTokenizer

        from aioengine.tokenization.tokenizer import Tokenizer

        if self._tokenizer_path is None:
            raise GrammarError("this engine has no tokenizer, which structured output needs")
        self._wait_until_quiet()
        own = Tokenizer(self._tokenizer_path)
        if eos_token_ids is None:
            eos_token_ids = end_ids(self._eos_token_ids, own.eos_token_id, self._vocab_size)
        self._wait_until_quiet()
        facts = cast("TokenizerFile", own.decoding_facts())
        table = read_token_table(facts, skip_special_tokens=False)
        if table is None:
            raise GrammarError("the tokenizer of this model edits its text in ways that no grammar can follow")
        special = {token["id"] for token in facts["added_tokens"] if token["special"]} | set(eos_token_ids)
        tokens = [token_bytes(table[token_id], is_special=token_id in special) for token_id in range(self._vocab_size)]
        ends = [token_id for token_id in eos_token_ids if token_id < len(tokens)]
        known = tokens if ends else [*tokens, SPECIAL + b"end"]  # the library needs an end
        self._num_computed = -(-len(known) // 32)
        encode = partial(own.encode, add_special_tokens=False)
        source = TokenSource(known, special, ends or [len(tokens)], encode)
        self._wait_until_quiet()
        tokenizer = LLTokenizer(cast("TokenizerWrapper", source), eos_token=source.eos_token_ids, slices=list(_SLICES))
        return _Vocabulary(tokens, tokenizer, encode)

    def _thinking(self, grammar: Grammar, vocabulary: _Vocabulary, prompt: Sequence[int]) -> Thinking | None:
        """None where there is none, or where it ends with the prompt."""
        end = grammar.reasoning_end
        if not end:
            return None
        ids = vocabulary.encode(end) if isinstance(end, str) else end
        text = end.encode() if isinstance(end, str) else b"".join(vocabulary.tokens[each] for each in end)
        text = text.rstrip(_SPACES) or text
        tail = b"".join(vocabulary.tokens[token_id] for token_id in prompt[-len(text) - 64 :])
        return None if _ends_with(tail, text) else Thinking(text, ids, max_tokens=grammar.max_thinking_tokens)


def _sorted(constraints: Sequence[Constraint]) -> tuple[list[tuple[Any, int]], list[tuple[Constraint, int]]]:
    """Those whose masks the library computes, as (matcher, row), and the others, as (constraint, row)."""
    computed: list[tuple[int, Any, int]] = []
    known: list[tuple[Constraint, int]] = []
    for row, constraint in enumerate(constraints):
        if constraint.next_token >= 0 or constraint.thinking is not None or constraint.is_over:
            known.append((constraint, row))
        else:
            computed.append((id(constraint.template), constraint.matcher, row))
    computed.sort(key=itemgetter(0))  # threads take neighbours, and those of one template wait for each other
    return [(matcher, row) for _, matcher, row in computed], known


def _fill_known(known: list[tuple[Constraint, int]], masks: Words) -> None:
    """Fill the masks [constraints, num_words] of these (constraint, row)."""
    for constraint, row in known:
        masks[row] = 0
        if constraint.thinking is not None:
            constraint.thinking.fill(masks[row], constraint.grammar.eos_token_ids)
        elif not constraint.is_over:
            _set(masks[row], constraint.next_token)


def _why(matcher: Any) -> str:
    """Why a matcher of the library has failed."""
    error: str = matcher.get_error().removesuffix("<non-verbose/>").strip()
    if error == "NoExtensionBias":
        return "no text fits it: a part of it, such as an empty class, matches nothing"
    if "nsatisfiable" in error:
        place = re.search(r"required property '.*?'", error)
        what = checks.cut(place[0]) if place else "it"
        return f"no value fits {what}: keywords contradict each other, or a pattern fits no text"
    if re.search("fuel|limit|items|[tT]oo (?:many|big|large)", error):
        return "it takes more work than is allowed; make it smaller, with fewer repetitions or alternatives"
    return checks.cut(error)


def _ends_with(text: bytes, end: bytes) -> bool:
    """Spaces aside, where ``end`` is more than that."""
    return (text if end.isspace() else text.rstrip(_SPACES)).endswith(end)


def _key(grammar: Grammar) -> tuple[str, str]:
    return grammar.kind, grammar.text


def _num_bytes(key: tuple[str, str]) -> int:
    return BYTES_PER_GRAMMAR + BYTES_PER_CHARACTER * len(key[1])


def _set(words: Words, token_id: int) -> None:
    words[token_id >> 5] |= np.uint32(1 << (token_id & 31)).view(np.int32)


def _clear(words: Words, token_id: int) -> None:
    words[token_id >> 5] &= ~np.uint32(1 << (token_id & 31)).view(np.int32)


def _clear_where_possible(words: Words, token_ids: Sequence[int]) -> None:
    """Rule these tokens out of words [ceil(V / 32)], unless no other is left."""
    kept = words.copy()
    for token_id in token_ids:
        _clear(kept, token_id)
    if kept.any():
        words[:] = kept

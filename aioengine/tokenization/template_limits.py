"""How large the values of a chat template may become, and how long it may run.

A template is code of the model's author, or of the sender of a request. It can only act in small steps: a turn of a
loop, a call, a filter, an operator, a piece of output. Every step asks the budget of its chat first, so nothing has to
be interrupted: the size of each value is limited before it is built, and the time is checked between two steps.

Sizes are in characters, or in ``NODE`` for every other value in a container.
"""

from __future__ import annotations

import re
import threading
from collections.abc import ItemsView, KeysView, Mapping, ValuesView
from time import monotonic, thread_time
from typing import TYPE_CHECKING, Final, TypeVar, cast

from jinja2.utils import Namespace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

MAX_SECONDS: Final = 1.0
"""CPU time of the thread for one chat, or for compiling one template."""
SECONDS_PER_SIZE: Final = 0.5e-6
"""Added for large chats."""
MAX_SIZE: Final = 4 * 1024 * 1024
"""Size of one value that a template builds, plus four times the size of the chat."""
MAX_BUILT: Final = 16 * MAX_SIZE
"""Size of all of them together, plus 64 times the size of the chat."""
MAX_CONSTANT, MAX_CODE = 256 * 1024, 1024 * 1024
"""Size of one value computed while a template is compiled; size of all of them and of the Python code together."""
MAX_BITS: Final = 4096
"""Bits of an integer."""
MAX_COUNT: Final = 10_000
"""Width of a formatted value, and other counts that make a result longer."""
MAX_ARGUMENT: Final = 1000
"""Characters of arguments that are short in every sensible use."""
MAX_COMPARISONS: Final = 2**28
"""Comparisons of characters in searches that may compare every character of two texts."""
NODE: Final = 16

_WIDTH = re.compile(r"\d+")
_WIDTH_FROM_ARGUMENT = re.compile(r"%(\([^)]*\))?[^a-zA-Z%]*\*|\{[^{}]*\{")
_PLACES = {"%": re.compile(r"%(?:\([^)]*\))?[^a-zA-Z%]*"), "{": re.compile(r"\{[^{}]*\}")}

Found = TypeVar("Found")


class TemplateLimitError(ValueError):
    """A template runs too long, or builds a value that is too large."""


class Budget:
    """What one use of a template may still spend. It belongs to the thread that made it.

    Attributes:
        max_size: of one value.
    """

    __slots__ = ("_built", "_chat", "_check_at", "_cpu_until", "_max_built", "_seconds", "max_size")

    def __init__(self, max_size: int, max_built: int, chat: object = None) -> None:
        """``chat``: the variables of the template; it is measured only if the limits without it do not suffice."""
        self.max_size = max_size
        self._max_built = max_built
        self._built = 0
        self._chat: list[object] = [] if chat is None else [chat]
        self._seconds = MAX_SECONDS
        self._check_at = monotonic() + MAX_SECONDS  # reading the CPU time costs more than reading the clock
        self._cpu_until = thread_time() + MAX_SECONDS

    def tick(self) -> None:
        """Raise TemplateLimitError if the CPU time is used up."""
        if monotonic() < self._check_at:
            return
        self._extend()
        left = self._cpu_until - thread_time()
        if left <= 0:
            raise TemplateLimitError(
                f"it ran for more than {self._seconds:.3g} s of CPU time; the loops of a template must be short"
            )
        self._check_at = monotonic() + left

    def allow(self, size: int) -> int:
        """Return the size limit of a value. Raises TemplateLimitError if ``size`` is above it."""
        if size > self.max_size:
            self._extend()
            if size > self.max_size:
                raise TemplateLimitError(f"it builds a value of more than {self.max_size} characters")
        return self.max_size

    def spend(self, size: int) -> None:
        """Count a value of this size. Raises TemplateLimitError if it, or all values together, are too large."""
        self._built += size
        if size <= self.max_size and self._built <= self._max_built and monotonic() < self._check_at:
            return  # nearly always
        self.tick()
        self.allow(size)
        self._extend()
        if self._built > self._max_built:
            raise TemplateLimitError(f"its values have more than {self._max_built} characters in all")

    def _extend(self) -> None:
        while self._chat:
            size = size_of(self._chat.pop(), 2**62)
            self.max_size += 4 * size
            self._max_built += 64 * size
            self._seconds += SECONDS_PER_SIZE * size
            self._cpu_until += SECONDS_PER_SIZE * size


class _Current(threading.local):
    budget: Budget | None = None


_current = _Current()


def run(budget: Budget, work: Callable[[], Found]) -> Found:
    """Do work within a budget."""
    before, _current.budget = _current.budget, budget
    try:
        return work()
    finally:
        _current.budget = before


def budget() -> Budget:
    """The budget of this thread's ``run``."""
    if _current.budget is None:
        raise TemplateLimitError("it is used outside of a chat")
    return _current.budget


def chat_budget(variables: object) -> Budget:
    return Budget(MAX_SIZE, MAX_BUILT, variables)


def compilation_budget() -> Budget:
    return Budget(MAX_CONSTANT, MAX_CODE)


# ---------------------------------------------------------------- sizes of values


def size_of(value: object, limit: int) -> int:
    """About the length of a value written as text, with everything in it; if above ``limit``, at least that."""
    size, waiting = 0, [value]
    while waiting and size <= limit:
        each = waiting.pop()
        if isinstance(each, str):
            size += len(each) + 1
            continue
        size += NODE
        if isinstance(each, Mapping):
            given = cast("Mapping[object, object]", each)
            size += NODE * len(given)
            waiting += given.keys()
            waiting += given.values()
        elif isinstance(each, list | tuple | set | frozenset | ItemsView | KeysView | ValuesView):
            size += NODE * len(cast("Sequence[object]", each))
            waiting += cast("Sequence[object]", each)
        elif isinstance(each, int):
            size += _int_size(each)
        elif isinstance(each, range):
            size += NODE * len(each)
        elif isinstance(each, Namespace):
            waiting.append(object.__getattribute__(each, "_Namespace__attrs"))
    return size


def measured(value: object) -> int:
    """The size of a value. Raises TemplateLimitError if it is too large."""
    allow, size = budget().allow, 0
    while (limit := allow(size)) < (size := size_of(value, limit)):
        pass  # it was not measured to its end; more may be allowed
    return size


def built(value: Found) -> Found:
    """Count a value that was built from others, which may be in it several times."""
    measured(value)
    return copied(value)


def copied(value: Found) -> Found:
    """Count a value that holds parts of another value, each at most as often as that one did."""
    given: object = value
    if isinstance(given, str):
        budget().spend(len(given))
    elif isinstance(given, list | tuple | dict):
        budget().spend(NODE * len(cast("Sequence[object]", given)))
    elif isinstance(given, int):
        _int_size(given)
    return value


def listed(values: Iterable[object]) -> list[object]:
    """All values of an iterable, which must not be too large together."""
    found: list[object] = []
    size, limits = 0, budget()
    for value in values:
        limits.tick()
        found.append(value)
        size += NODE + measured(value)
        limits.allow(size)
    limits.spend(size)
    return found


def concatenated(pieces: Iterable[str]) -> str:
    """Pieces of output as one text."""
    found: list[str] = []
    size, limits = 0, budget()
    for piece in pieces:
        found.append(piece)
        size += len(piece)
        limits.allow(size)
    limits.spend(size)
    return "".join(found)


def _int_size(value: int) -> int:
    """Decimal digits of an integer."""
    bits = value.bit_length()
    if bits > MAX_BITS:
        raise TemplateLimitError(f"it uses an integer of {bits} bits; {MAX_BITS} are allowed")
    return bits // 3


# ---------------------------------------------------------------- checks before a result is built


def check_operands(operator: str, left: object, right: object) -> None:
    """Raise TemplateLimitError if the result of an operator would be too large."""
    if isinstance(left, int) and isinstance(right, int):
        bits = max(left.bit_length(), right.bit_length())
        if operator == "**":
            bits = left.bit_length() * max(right, 1)
        elif operator == "*":
            bits = left.bit_length() + right.bit_length()
        if bits > MAX_BITS:
            raise TemplateLimitError(f"{operator} makes an integer of about {bits} bits; {MAX_BITS} are allowed")
        budget().tick()
    elif operator == "%" and isinstance(left, str):
        spend_formatted(left, "%", right)
    elif operator == "*":
        value, times = (right, left) if isinstance(left, int) else (left, right)
        budget().spend(measured(value) * max(times, 0) if isinstance(times, int) else 0)
    elif operator == "+":
        budget().spend(measured(left) + measured(right))
    else:
        budget().tick()


def spend_formatted(form: str, mark: str, values: object) -> None:
    """Count a text with values at the places that begin with ``mark``, by the largest width that it names."""
    if _WIDTH_FROM_ARGUMENT.search(form):
        raise TemplateLimitError("the widths of formatted values must be written in the text of the format")
    widths = _WIDTH.findall("".join(_PLACES[mark].findall(form)))
    width = max((int(digits[:9]) for digits in widths), default=0)
    budget().spend(len(form) + form.count(mark) * (width + measured(values)))


def spend_replaced(text: str, old: str, new: str, count: int | None = None) -> None:
    """Count ``text`` with all or the first ``count`` places of ``old`` replaced."""
    num_places = text.count(old)
    if count is not None and count >= 0:
        num_places = min(num_places, count)
    budget().spend(len(text) + num_places * len(new))


def spend_joined(separator: str, values: Sequence[object]) -> None:
    budget().spend(measured(values) + len(separator) * len(values))


def check_search(text: str, *given: object) -> None:
    """Raise TemplateLimitError if a search may compare each character of a text with each of a long argument."""
    longest = max((len(each) for each in given if isinstance(each, str)), default=0)
    if len(text) * longest > MAX_COMPARISONS:
        raise TemplateLimitError(f"a search for {longest} characters in a text of {len(text)} would take too long")


def check_count(name: str, count: object) -> None:
    """Raise TemplateLimitError if a width or count is too large; a text counts by its length."""
    number = len(count) if isinstance(count, str) else count
    if isinstance(number, int) and abs(number) > MAX_COUNT:
        raise TemplateLimitError(f"{name} of {number}; at most {MAX_COUNT} is allowed")


def check_short(name: str, given: object, most: int = MAX_ARGUMENT) -> None:
    if size_of(given, most + NODE) > most + NODE:
        raise TemplateLimitError(f"{name} takes at most {most} characters")

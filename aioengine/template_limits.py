"""How much a chat template may build, and for how long it may run.

Templates are code of the model's author, or of whoever sent a request. All that they can do is done in small steps (a
turn of a loop, a call, a filter, an operator, a piece of output), and each of them asks here first: no step is large,
as what is built has a limit, and between two of them the time is looked at. Nothing has to be interrupted.

Sizes are about bytes: the characters of text, and ``NODE`` for every other value in a container.
"""

from __future__ import annotations

import re
import threading
from time import monotonic, thread_time
from typing import TYPE_CHECKING, Final, TypeVar, cast

from jinja2.utils import Namespace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

MAX_SECONDS: Final = 1.0
"""CPU time of the thread for one chat, or for compiling one template."""
SECONDS_PER_BYTE: Final = 0.5e-6
"""More for large chats."""
MAX_SIZE: Final = 4 * 1024 * 1024
"""Of one value that a template builds, besides four times what it was given."""
MAX_BUILT: Final = 64 * MAX_SIZE
"""Of all of them, besides 64 times what it was given."""
MAX_CONSTANTS: Final = 256 * 1024
"""What is computed while a template is compiled."""
MAX_BITS: Final = 4096
"""Of an integer."""
SMALL: Final = 2**62
"""Non-negative integers below it may be put into every operator but the power."""
MAX_WIDTH: Final = 10_000
"""Of a formatted value, and other counts that make a result longer."""
NODE: Final = 16

Found = TypeVar("Found")

MAX_COMPARISONS: Final = 2**28
"""Of characters, in the methods of text that may compare each with each."""

_SEARCHES = frozenset(("rfind", "rindex", "rsplit", "rpartition", "strip", "lstrip", "rstrip"))
_WIDTH = re.compile(r"\d+")
_WIDTH_FROM_ARGUMENT = re.compile(r"%(\([^)]*\))?[^a-zA-Z%]*\*|\{[^{}]*\{")


class TemplateLimitError(ValueError):
    """A template runs for too long, or builds too much."""


class Budget:
    """What one use of a template has left. Belongs to the thread that made it.

    Attributes:
        max_size: of one value.
        until: the wall time before which the CPU time cannot be over: it costs little to read.
    """

    __slots__ = ("_built", "_cpu_until", "_given", "_max_built", "_seconds", "max_size", "until")

    def __init__(self, max_size: int, max_built: int, given: object = None) -> None:
        """``given``: the values that a chat is written from. Large ones allow more; they are measured when needed."""
        self.max_size = max_size
        self._max_built = max_built
        self._built = 0
        self._given: list[object] = [] if given is None else [given]
        self._seconds = MAX_SECONDS
        self.until = monotonic() + MAX_SECONDS
        self._cpu_until = thread_time() + MAX_SECONDS

    def _extend(self) -> None:
        """Allow what the given values allow."""
        while self._given:
            size = size_of(self._given.pop(), 2**62)
            self.max_size += 4 * size
            self._max_built += 64 * size
            self._seconds += SECONDS_PER_BYTE * size
            self._cpu_until += SECONDS_PER_BYTE * size

    def check_time(self) -> None:
        """Raise TemplateLimitError where the CPU time is over."""
        self._extend()
        left = self._cpu_until - thread_time()
        if left <= 0:
            raise TemplateLimitError(
                f"it ran for more than {self._seconds:.3g} s of CPU time; the loops of a template must be short"
            )
        self.until = monotonic() + left

    def allow(self, size: int) -> int:
        """The largest size of a value. Raises TemplateLimitError where ``size`` is above it."""
        if size > self.max_size:
            self._extend()
            if size > self.max_size:
                raise TemplateLimitError(f"it builds a value of more than {self.max_size} bytes")
        return self.max_size

    def spend(self, size: int) -> None:
        """Raise TemplateLimitError where a value of this size is too large, or was too much in all."""
        if monotonic() >= self.until:
            self.check_time()
        self.allow(size)
        self._built += size
        if self._built > self._max_built:
            self._extend()
            if self._built > self._max_built:
                raise TemplateLimitError(f"the values that it builds have more than {self._max_built} bytes in all")


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


def tick() -> None:
    """Raise TemplateLimitError where the time is over."""
    budget = _current.budget
    if budget is not None and monotonic() >= budget.until:
        budget.check_time()


def spend(size: int) -> None:
    """Nothing is built outside of ``run``, where no limit would hold."""
    budget = _current.budget
    if budget is None:
        raise TemplateLimitError("it is used outside of a chat")
    budget.spend(size)


def allow(size: int) -> int:
    """The largest size of a value. Raises TemplateLimitError where ``size`` is above it."""
    budget = _current.budget
    return MAX_SIZE if budget is None else budget.allow(size)


def chat_budget(variables: object) -> Budget:
    """For writing out a chat of these values."""
    return Budget(MAX_SIZE, MAX_BUILT, variables)


def compilation_budget() -> Budget:
    return Budget(MAX_CONSTANTS, MAX_CONSTANTS)


def size_of(value: object, limit: int) -> int:
    """About the bytes of a value written out, with all that is in it; something above ``limit`` where it is more."""
    size, waiting = 0, [value]
    while waiting and size <= limit:
        each = waiting.pop()
        if isinstance(each, str | bytes):
            size += len(each) + 1
            continue
        size += NODE
        if isinstance(each, dict):
            given = cast("dict[object, object]", each)
            size += NODE * len(given)
            waiting += given.keys()
            waiting += given.values()
        elif isinstance(each, list | tuple | set | frozenset):
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
    """The size of a value. Raises TemplateLimitError where it is too large."""
    size = 0
    while (limit := allow(size)) < (size := size_of(value, limit)):
        pass  # it was not measured to its end; more may be allowed
    return size


def _int_size(value: int) -> int:
    bits = value.bit_length()
    if bits > MAX_BITS:
        raise TemplateLimitError(f"it uses an integer of {bits} bits; {MAX_BITS} are allowed")
    return bits // 3


def built(value: object) -> object:
    """A value that was built from others, which may be in it several times."""
    measured(value)
    return copied(value)


def copied(value: object) -> object:
    """A value with parts of others, each of them at most as often as there: all that is in it cannot be too large."""
    _spend_copy(value)
    return value


def _spend_copy(value: object) -> None:
    if isinstance(value, str | bytes):
        spend(len(value))
    elif isinstance(value, list | tuple | dict):
        spend(NODE * len(cast("Sequence[object]", value)))
    elif isinstance(value, int):
        _int_size(value)


# ---------------------------------------------------------------- results that may be far larger than their parts


def check_operands(operator: str, left: object, right: object) -> None:
    """Raise TemplateLimitError where the result of an operator is too large."""
    if isinstance(left, int) and isinstance(right, int):
        _check_integers(operator, left, right)
    elif operator == "%" and isinstance(left, str | bytes):
        spend(formatted_size(left, "%", right))
    elif operator == "*":
        spend(_repeated_size(left, right))
    elif operator == "+" and not isinstance(left, float):
        spend(measured(left) + measured(right))
    else:
        tick()


def _check_integers(operator: str, left: int, right: int) -> None:
    tick()
    bits = max(_int_size(left), _int_size(right)) * 3
    if operator == "**":
        bits = left.bit_length() * max(right, 1)
    elif operator == "*":
        bits = left.bit_length() + right.bit_length()
    if bits > MAX_BITS:
        raise TemplateLimitError(f"{operator} makes an integer of about {bits} bits; {MAX_BITS} are allowed")


def _repeated_size(left: object, right: object) -> int:
    value, times = (right, left) if isinstance(left, int) else (left, right)
    if not isinstance(times, int):
        return 0  # an error, which the operator raises
    return (len(value) if isinstance(value, str | bytes) else measured(value)) * max(times, 0)


def formatted_size(form: str | bytes, mark: str, values: object) -> int:
    """At most the size of a text with values in the places that begin with ``mark``."""
    text = form if isinstance(form, str) else form.decode("latin-1")
    if _WIDTH_FROM_ARGUMENT.search(text):
        raise TemplateLimitError("the widths of formatted values must be written in the text of the format")
    num_places = text.count(mark)
    width = max((min(len(digits), 9) and int(digits[:9]) for digits in _WIDTH.findall(text)), default=0)
    if not num_places:
        width = 0
    elif width > MAX_WIDTH and any(len(digits) > 4 for digits in _WIDTH.findall(text)):
        width = _largest_width(text, mark)
    return len(text) + num_places * (width + measured(values))


def _largest_width(text: str, mark: str) -> int:
    """The widths are in the places alone; numbers elsewhere in the text say nothing."""
    pattern = r"%(?:\([^)]*\))?[^a-zA-Z%]*" if mark == "%" else r"\{[^{}]*\}"
    places = "".join(re.findall(pattern, text))
    return max((int(digits[:9]) for digits in _WIDTH.findall(places)), default=0)


def replaced_size(text: str, old: str, new: str, limit: int = -1) -> int:
    """``text`` with all or the first ``limit`` of ``old`` replaced."""
    num_places = text.count(old)
    if limit >= 0:
        num_places = min(num_places, limit)
    return len(text) + num_places * len(new)


def joined_size(separator: str | bytes, values: Sequence[object]) -> int:
    return measured(values) + len(separator) * len(values)


def listed(values: Iterable[object]) -> list[object]:
    """The values of any iterable, which are not too much together."""
    found: list[object] = []
    size, limit = 0, allow(0)
    for value in values:
        tick()
        found.append(value)
        size += NODE + measured(value)
        if size > limit:
            limit = allow(size)
    spend(size)
    return found


def method_size(value: str | bytes | int, name: str, given: Sequence[object]) -> int:
    """At most the size of what a method of text, or of a number, returns."""
    if isinstance(value, int):
        return max((each for each in given if isinstance(each, int)), default=0) if name == "to_bytes" else 0
    size = len(value)
    if name in _SEARCHES:
        check_search(value, *given)
    if name == "join" and given and isinstance(given[0], list):
        return joined_size(value, cast("list[object]", given[0]))
    if name == "replace":
        return _replaced_by_method(value, given)
    if name in ("center", "ljust", "rjust", "zfill", "expandtabs"):
        count = max((each for each in given if isinstance(each, int)), default=8)
        return size * max(count, 1) if name == "expandtabs" and _has_tabs(value) else max(size, count)
    if name == "translate":
        return size * (1 + measured(given))
    return size


def check_search(text: str | bytes, *given: object) -> None:
    """Raise TemplateLimitError where each character of a text may be compared with a long argument."""
    longest = max((len(each) for each in given if isinstance(each, str | bytes)), default=0)
    if len(text) * longest > MAX_COMPARISONS:
        raise TemplateLimitError(f"a search for {longest} characters in a text of {len(text)} would take too long")


def _has_tabs(value: str | bytes) -> bool:
    return "\t" in value if isinstance(value, str) else b"\t" in value


def _replaced_by_method(value: str | bytes, given: Sequence[object]) -> int:
    texts = [each.decode("latin-1") if isinstance(each, bytes) else each for each in (value, *given)]
    text, old, new = (*(each if isinstance(each, str) else "" for each in texts), "", "")[:3]
    return replaced_size(text, old, new)


def check_count(name: str, count: object) -> None:
    if isinstance(count, int) and abs(count) > MAX_WIDTH:
        raise TemplateLimitError(f"{name} with {count}; at most {MAX_WIDTH} is allowed")

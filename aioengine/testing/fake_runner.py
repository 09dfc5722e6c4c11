"""FakeRunner: a runner without a model. The next token is a hash of all previous tokens, read from simulated pages.

Each row writes its token ids to the slots of its positions, and the sampled token depends on all slots of the request.
So a mistake in positions, pages, chunks, prefix hits, preemption or overlap changes the output.
"""

from __future__ import annotations

import math
import time
import zlib
from array import array
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from pathlib import Path
from struct import pack
from typing import NamedTuple, Self

import msgspec

from aioengine.model_files import adapter_folder
from aioengine.protocol.columns import (
    HIDDEN_STATES,
    NO_TOKEN,
    POOLED_VECTOR,
    PROMPT_STATES,
    Extra,
    TokenColumns,
    block_extras,
)
from aioengine.protocol.messages import ALL_STATES, Adapter, Control, Fact, Progress, Reply, RequestKind, Sampling
from aioengine.protocol.packed_logprobs import NEXT_LOGPROBS, OUTPUT_LOGPROBS, PROMPT_LOGPROBS, LogprobRules
from aioengine.scheduler.plan import NewRow, Row, StepPlan, StepResult
from aioengine.scheduler.planner import OUTPUTS
from aioengine.settings.config import Settings
from aioengine.testing.faults import Faults

MASK = (1 << 64) - 1
UNWRITTEN = -1
DEFAULT_NUM_PAGES = 4096
ECHO = "echo"
"""The only control call of fake runners."""
FAKE_EXTRA = "fake"
HIDDEN_SIZE = 8
PRINTABLE = "abcdefghijklmnopqrstuvwxyz etaoin. "  # an alphabet whose texts look a little like text


class FakeModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The parameters of the fake model.

    vocab_size: tokens are 0 ... vocab_size - 1. alphabet: if not empty, only the code points of these characters are
    sampled, which are tokens of the byte tokenizer. eos_token_id: sampled with ``eos_probability`` at each position.
    tokens_per_step: digits from 1, used cyclically: the n-th digit is the number of tokens in the n-th result of a
    request (the sampled token and forced tokens). accepts: digits, used cyclically: the n-th digit is the maximum
    number of drafts that the n-th row with drafts of a request accepts. gives_extras: each token has an extra,
    ``extra_of``.
    step_time_s: time of the device for a step. adapter_s: time to read an adapter.
    """

    vocab_size: int = 256
    alphabet: str = ""
    eos_token_id: int = -1
    eos_probability: float = 0.0
    tokens_per_step: str = "1"
    accepts: str = "0"
    gives_extras: bool = False
    step_time_s: float = 0.0
    adapter_s: float = 0.0

    def candidates(self) -> list[int]:
        """Return the ids that can be sampled, except ``eos_token_id``."""
        ids = [ord(letter) for letter in self.alphabet] or list(range(self.vocab_size))
        if max(ids) >= self.vocab_size:
            raise ValueError(f"the alphabet {self.alphabet!r} has ids beyond the vocabulary of {self.vocab_size}")
        others = [token_id for token_id in ids if token_id != self.eos_token_id]
        if not others:
            raise ValueError(f"a vocabulary of {self.vocab_size} has no token besides eos_token_id={self.eos_token_id}")
        return others


class NextToken:
    """The function of the model: from the checksum of all tokens to the next token."""

    def __init__(self, model: FakeModel) -> None:
        self._candidates = model.candidates()
        self._eos_token_id = model.eos_token_id
        self._eos_below = int(model.eos_probability * (1 << 32))

    def __call__(self, checksum: int, num_tokens: int, num_prompt: int, sampling: Sampling) -> int:
        """Return the token at position ``num_tokens``. It depends on the seed unless ``sampling`` is greedy."""
        number = _mix(checksum + (num_tokens << 32))
        if not sampling.is_greedy:
            number = _mix(number ^ (sampling.seed * 0x9E3779B97F4A7C15 & MASK))
        suppressed = sampling.suppressed_token_ids if num_tokens - num_prompt < sampling.min_new_tokens else ()
        if number >> 32 < self._eos_below and self._eos_token_id not in suppressed:
            return self._eos_token_id
        candidates = self._candidates
        first = number % len(candidates)
        token_id = candidates[first]
        if token_id in suppressed:
            others = candidates[first:] + candidates[:first]
            token_id = next((other for other in others if other not in suppressed), token_id)
        return token_id


def _mix(number: int) -> int:
    """Mix 64 bits (the finalizer of SplitMix64)."""
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB & MASK
    return number ^ (number >> 31)


def fake_vector(number: int) -> bytes:
    """Return ``HIDDEN_SIZE`` floats from -1 to 1 that depend on the number."""
    return pack(f"<{HIDDEN_SIZE}f", *((_mix(number + (i << 32)) >> 40) / (1 << 23) - 1 for i in range(HIDDEN_SIZE)))


def fake_states(uid: int, sampling: Sampling, position: int, num_prompt: int) -> list[Extra]:
    """Return the hidden states of the token at this position. The first token includes the states of the prompt."""
    own = fake_vector(position - 1)
    states = [Extra(uid, position - num_prompt, HIDDEN_STATES, own)]
    if sampling.hidden_states == ALL_STATES and position == num_prompt:
        states += block_extras(uid, PROMPT_STATES, b"".join(map(fake_vector, range(position - 1))), len(own))
    return states


def extra_of(uid: int, index: int, token_id: int) -> Extra:
    """Return the extra of an output token for ``FakeModel.gives_extras``."""
    return Extra(uid, index, FAKE_EXTRA, token_id.to_bytes(4, "little"))


def fake_logprobs(rules: LogprobRules, token_id: int, vocab_size: int) -> bytes:
    """Return packed logprobs in which this token is the most likely one, followed by the next ids."""
    ids = [(token_id + i) % vocab_size for i in range(rules.num_top)]
    values = [-0.5 * (1 + (each - token_id) % vocab_size) for each in (token_id, *ids, *rules.token_ids)]
    return pack(f"<{rules.num_values}f{1 + rules.num_top}i", *values, token_id, *ids)


class FakeAdapter(NamedTuple):
    """An adapter in memory: a number computed from its tensors, which changes the output of the fake model."""

    number: int
    num_bytes: int


def read_fake_adapter(path: str) -> FakeAdapter:
    """Read the folder of an adapter with fp32 tensors.

    Raises:
        ValueError: the file cannot be read, or a number in it is not finite.
    """
    try:
        content = (Path(path) / adapter_folder.TENSORS).read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    start = 8 + int.from_bytes(content[:8], "little")
    numbers = array("f", content[start:])
    if not all(map(math.isfinite, numbers)):
        raise ValueError(f"{path} has a number that is not finite")
    return FakeAdapter(zlib.crc32(numbers) >> 2, len(content))


class _FakeRow(msgspec.Struct):
    """The state of a request between steps.

    Attributes:
        adapter: the number of its adapter; 0: none.
        num_drafted: rows with drafts.
        num_rejected: drafts rejected in flight, which the scheduler does not know.
    """

    opened: NewRow
    pages: list[int]
    adapter: int = 0
    num_steps: int = 0
    num_drafted: int = 0
    num_rejected: int = 0
    known_end: int = 0
    last_token: int | None = None


class FakeTicket(msgspec.Struct):
    """A step in flight.

    Attributes:
        done_at: the time at which the simulated device finishes it.
        rejected: rows with rejected drafts, and their number.
    """

    step: int
    result: StepResult
    done_at: float
    rejected: list[tuple[_FakeRow, int]]


class FakeAdapterSlots:
    """Implements ``DeviceAdapters``. numbers: of the adapters in the slots, from index 1."""

    def __init__(self, num_slots: int, read_s: float) -> None:
        self.num_slots = num_slots
        self.numbers = [0] * (1 + num_slots)
        self._read_s = read_s

    def read(self, adapter: Adapter) -> FakeAdapter:
        time.sleep(self._read_s)
        return read_fake_adapter(adapter.path)

    def is_read_by_all(self, is_read: bool) -> bool:
        return is_read

    def place(self, slot: int, adapter: FakeAdapter) -> Future[None]:
        self.numbers[slot] = adapter.number  # open rows keep their adapter
        placed = Future[None]()
        placed.set_result(None)
        return placed


class FakeRunner:
    """Implements ``Runner``. Steps are computed in launch order, with the timing of one device."""

    def __init__(
        self,
        model: FakeModel,
        *,
        num_pages: int,
        page_size: int,
        faults: Faults | None = None,
        num_adapter_slots: int = 0,
    ) -> None:
        self._model = model
        self._faults = faults or Faults()
        self._page_size = page_size
        self._num_pages = num_pages
        self._next_token = NextToken(model)
        self._tokens_per_step = [int(digit) for digit in model.tokens_per_step]
        self._slots = array("q", [UNWRITTEN]) * (num_pages * page_size)
        self._bytes = memoryview(self._slots).cast("B")
        self._rows: dict[int, _FakeRow] = {}
        self._step = 0
        self._num_in_flight = 0
        self._busy_until = 0.0
        self.adapters = FakeAdapterSlots(num_adapter_slots, model.adapter_s) if num_adapter_slots else None
        self.use_grammars = None
        self._send_plan: Callable[[StepPlan, Collection[int]], None] | None = None

    @classmethod
    def from_settings(cls, settings: Settings) -> Self:
        """Build a runner from ``settings``. ``options`` has fields of ``FakeModel`` and ``Faults``."""
        options: dict[str, object] = {"vocab_size": settings.model.vocab_size, **settings.runner.options}
        for_faults = {name: options.pop(name) for name in Faults.__struct_fields__ if name in options}
        faults = msgspec.convert(for_faults, Faults)
        model = msgspec.convert(options, FakeModel)
        faults.on_start()
        return cls(
            model,
            num_pages=settings.memory.num_pages or DEFAULT_NUM_PAGES,
            page_size=settings.memory.page_size,
            faults=faults,
            num_adapter_slots=0 if settings.runner.lora is None else settings.runner.lora.num_slots,
        )

    def use_ranks(self, send_plan: Callable[[StepPlan, Collection[int]], None]) -> None:
        """See ``Runner``. The other ranks compute other tokens, because nothing is broadcast."""
        self._send_plan = send_plan

    @property
    def facts(self) -> Mapping[str, Fact]:
        """The facts of a real runner, with values for this one."""
        return {
            "num_pages": self._num_pages,
            "page_size": self._page_size,
            "max_total_tokens": self._num_pages * self._page_size,
            "dtype": "none",
            "device": "cpu",
            "attention_backend": "fake",
            "weights_bytes": 0,
            "kv_pool_bytes": len(self._bytes),
            "load_s": 0.0,
        }

    def launch(self, plan: StepPlan) -> FakeTicket:
        """Compute the step and record when the device would finish it. Raises RuntimeError for a wrong plan."""
        self._step += 1
        self._faults.on_launch(self._step)
        for uid in plan.closed:
            self._rows.pop(uid, None)
        for opened in plan.new_rows:
            row = self._rows[opened.uid] = _FakeRow(opened, list(opened.pages))
            if opened.adapter_slot:
                row.adapter = 0 if self.adapters is None else self.adapters.numbers[opened.adapter_slot]
                if not row.adapter:
                    raise RuntimeError(f"request {opened.uid} uses slot {opened.adapter_slot}, which is empty")
        result = StepResult(TokenColumns())
        for row in plan.rows:
            self._compute(row, result)
        with_outputs = [row.uid for row in plan.rows if row.outputs]
        if self._faults.fail_row_at == self._step and with_outputs:
            result.failed[with_outputs[0]] = f"as asked for by fail_row_at={self._step}"
        if self._send_plan is not None:
            self._send_plan(plan, result.failed)
        rejected = [(self._rows[uid], count) for uid, count in result.num_rejected.items()]
        if self._model.step_time_s:
            self._busy_until = max(self._busy_until, time.monotonic()) + self._model.step_time_s
        self._num_in_flight += 1
        return FakeTicket(self._step, result, self._busy_until, rejected)

    def collect(self, ticket: FakeTicket) -> StepResult:
        """Wait for the simulated device."""
        self._num_in_flight -= 1
        for held, count in ticket.rejected:
            held.num_rejected -= count
        if ticket.done_at > 0:  # its steps take time
            time.sleep(max(0.0, ticket.done_at - time.monotonic()))
        self._faults.on_collect(ticket.step)
        return ticket.result

    @property
    def controls(self) -> Mapping[str, Callable[[Control], Reply]]:
        return {ECHO: self._echo}

    def close(self) -> None:
        self._rows.clear()

    def _echo(self, message: Control) -> Reply:
        """Return the arguments, the number of launched steps, and how many of them are in flight."""
        self._faults.on_control(message.name)
        data = {"arguments": message.arguments, "num_steps": self._step, "num_in_flight": self._num_in_flight}
        return Reply(message.call_id, True, data=msgspec.json.encode(data).decode())

    def _compute(self, row: Row, result: StepResult) -> None:
        """Write the tokens of a row to its slots, and add its results to ``result``."""
        held, tokens = self._rows.get(row.uid), result.tokens
        if held is None:
            raise RuntimeError(f"row of request {row.uid}, which was never opened")
        opened = held.opened
        held.pages += row.new_pages
        token_ids, num_known = row.token_ids, row.count - row.num_drafts
        if len(token_ids) < num_known:
            if held.last_token is None or len(token_ids) != num_known - 1:
                raise RuntimeError(f"request {row.uid}: {len(token_ids)} of {row.count} tokens, and none is held")
            token_ids = [*token_ids, held.last_token]
        if row.start + row.count > len(held.pages) * self._page_size:
            raise RuntimeError(f"request {row.uid}: {len(held.pages)} pages for {row.start + row.count} positions")
        start = row.start - held.num_rejected
        self._write(row.uid, held, start, token_ids)
        if not row.outputs:
            return
        if row.outputs != OUTPUTS[opened.kind]:
            raise RuntimeError(f"request {row.uid} of kind {opened.kind.name} has a row that gives {row.outputs}")
        first = end = start + num_known
        checksum = self._checksum(held.pages, end)
        rules = opened.logprobs
        if rules is not None and 0 <= rules.start < opened.num_prompt and row.start < opened.num_prompt:
            prompt = opened.token_ids[rules.start : opened.num_prompt]
            numbers = [fake_logprobs(rules, token_id, self._model.vocab_size) for token_id in prompt]
            tokens.extras += block_extras(row.uid, PROMPT_LOGPROBS, b"".join(numbers), rules.position_bytes)
        if opened.kind is not RequestKind.GENERATE:
            tokens.add(row.uid, ())
            tokens.extras.append(self._last_extra(row, opened, checksum))
            return
        new = [self._token(opened, checksum, end)]
        if row.num_drafts:
            num_accepted = min(row.num_drafts, int(self._model.accepts[held.num_drafted % len(self._model.accepts)]))
            held.num_drafted += 1
            result.num_proposed[row.uid] = row.num_drafts
            for _ in range(num_accepted):
                self._write(row.uid, held, end, new[-1:])
                end += 1
                checksum = self._checksum(held.pages, end)
                new.append(self._token(opened, checksum, end))
            if num_rejected := row.num_drafts - num_accepted:
                self._write(row.uid, held, end, [new[-1] + 1] * num_rejected)
                result.num_rejected[row.uid] = num_rejected
                held.num_rejected += num_rejected
        held.last_token = token_id = new[-1]
        new = new[max(0, held.known_end - first) :]  # an earlier step gave the tokens before
        if end >= held.known_end:
            held.known_end = end + self._tokens_per_step[held.num_steps % len(self._tokens_per_step)]
            held.num_steps += 1
            for position in range(end + 1, held.known_end):
                checksum = zlib.crc32(array("q", [token_id + (held.adapter << 32)]), checksum)
                token_id = self._token(opened, checksum, position)
                new.append(token_id)
        for position, token_id in enumerate(new, max(end + 1, held.known_end) - len(new)):
            if rules is not None:
                packed = fake_logprobs(rules, token_id, self._model.vocab_size)
                tokens.extras.append(Extra(row.uid, position - opened.num_prompt, OUTPUT_LOGPROBS, packed))
            if opened.sampling.hidden_states:
                tokens.extras += fake_states(row.uid, opened.sampling, position, opened.num_prompt)
            if self._model.gives_extras:
                tokens.extras.append(extra_of(row.uid, position - opened.num_prompt, token_id))
        tokens.add(row.uid, new)

    def _token(self, opened: NewRow, checksum: int, position: int) -> int:
        """Return the token of a request at a position. checksum: of all tokens before."""
        return self._next_token(checksum, position, opened.num_prompt, opened.sampling)

    def _last_extra(self, row: Row, opened: NewRow, checksum: int) -> Extra:
        """Return the result of a request without output tokens."""
        if opened.kind is RequestKind.POOL:
            return Extra(row.uid, NO_TOKEN, POOLED_VECTOR, fake_vector(checksum))
        if opened.logprobs is None:
            raise RuntimeError(f"request {row.uid} of kind SCORE asks for no logprobs")
        likeliest = FakeRunner._token(self, opened, checksum, row.start + row.count)
        numbers = fake_logprobs(opened.logprobs, likeliest, self._model.vocab_size)
        return Extra(row.uid, NO_TOKEN, NEXT_LOGPROBS, numbers)

    def _write(self, uid: int, held: _FakeRow, start: int, token_ids: list[int]) -> None:
        """Write tokens of a request to the slots of its positions from ``start`` on."""
        size = self._page_size
        for position, token_id in enumerate(token_ids, start):
            self._faults.on_token(token_id)
            slot = held.pages[position // size] * size + position % size
            self._slots[slot] = token_id + (held.adapter << 32)

    def _checksum(self, pages: list[int], num_tokens: int) -> int:
        """Return the CRC-32 of the slots of positions 0 ... num_tokens - 1."""
        page_bytes = self._page_size * self._slots.itemsize
        left = num_tokens * self._slots.itemsize
        checksum = 0
        for page in pages:
            if left <= 0:
                break
            first = page * page_bytes
            checksum = zlib.crc32(self._bytes[first : first + min(page_bytes, left)], checksum)
            left -= page_bytes
        return checksum


def build(settings: Settings, report: Callable[[Progress], None]) -> FakeRunner:
    """The factory for ``RunnerSettings.factory``."""
    return FakeRunner.from_settings(settings)

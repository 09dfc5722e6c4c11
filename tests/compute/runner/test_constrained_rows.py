"""Grammars in the runner: exact with overlap, in batches, after preemption and with forced tokens; their masks."""

from __future__ import annotations

import dataclasses
import json
import re
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import jsonschema
import numpy as np
import pytest
import torch
from msgspec.structs import replace

from aioengine.api import answers
from aioengine.constraints.grammars import Grammars
from aioengine.errors import RequestError
from aioengine.protocol.messages import LAST_STATES, FinishCode, Grammar, Sampling
from aioengine.protocol.packed_logprobs import LogprobRules
from aioengine.runner import constrained_rows
from aioengine.runner.graphs.token_rows import can_expand
from aioengine.runner.logits.grammar import GrammarMask
from aioengine.runner.request_row import LogitsRow, RequestRow
from tests.compute.interpreted import run_interpreted
from tests.compute.runner_world import World, make_settings, save_model
from tests.kit.grammar_walks import FOLDER, grammar_of, text_of, token_bytes
from tests.kit.grids import grid
from tests.kit.tiny_sizes import VOCAB_SIZE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from aioengine.runner.inputs import StepRows
    from aioengine.runner.model_runner import ModelRunner
    from aioengine.runner.request_row import SampledRows

SCHEMA = {
    "type": "object",
    "properties": {
        "amounts": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
        "b": {"enum": ["x", "yyyyyyyyy", "yyyyyyyyzzz"]},
    },
    "required": ["amounts", "b"],
    "additionalProperties": False,
}
GRAMMARS = [grammar_of(json_schema=SCHEMA), grammar_of(regex="[a-d]{3,30}!"), grammar_of(choice=["abcab", "abd", "c"])]
SAMPLINGS = [
    Sampling(index, temperature=1.0, grammar=GRAMMARS[index % 4] if index % 4 < 3 else None) for index in range(10)
]
PROMPTS = [[index + 1] * (index + 3) for index in range(10)]
NOT_FORCED = 1_000_000
A_AND_X = tuple(index for index, data in enumerate(token_bytes()) if data in (b"a", b"x"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_model("llama", path)
    return path


def make_world(
    folder: Path, *, depth: int, min_forced: int = NOT_FORCED, max_tokens: int = 1_000, chunk_tokens: int = 64
) -> World:
    world = World(make_settings(folder, depth=depth, chunk_tokens=chunk_tokens))
    world.runner.use_grammars(Grammars(str(FOLDER), VOCAB_SIZE))
    world.runner._constrained.min_forced = min_forced
    world.runner._constrained.max_tokens = max_tokens
    return world


def answer_all(world: World, preempts_every: int) -> list[int]:
    """Compute all prompts, with a preemption every few steps. Return their uids."""
    uids = [
        world.submit(prompt, sampling, max_new_tokens=40) for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=True)
    ]
    num_steps = 0
    while world.core.has_work:
        world.step()
        num_steps += 1
        if preempts_every and num_steps % preempts_every == 0 and world.core.requests.running:
            world.core.requests.preempt()
    return uids


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[list[int]]:
    """The answers without forced tokens."""
    world = make_world(folder, depth=0)
    return [
        world.answers([prompt], [sampling], max_new_tokens=40)[0]
        for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=True)
    ]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_answers_in_steps_with_prompts_equal_the_answers_of_single_requests(
    folder: Path, alone: list[list[int]], depth: int
) -> None:
    world = make_world(folder, depth=depth, chunk_tokens=12)
    uids = [
        world.submit(prompt, sampling, max_new_tokens=40) for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=True)
    ]
    for number in range(8):  # while the others decode
        world.step()
        world.submit([number + 1] * 60)
    world.run()
    assert [world.outputs[uid] for uid in uids] == alone


@pytest.mark.parametrize(
    ("depth", "preempts_every", "min_forced", "max_tokens", "has_logprobs"),
    grid(
        [(0, 0), (1, 0), (2, 0), (0, 4), (1, 4), (2, 3)],
        [(2, 1_000, False), (1, 1_000, True), (4, 24, True), (NOT_FORCED, 1_000, False)],
    ),
)
def test_answers_equal_the_answers_of_single_requests(
    folder: Path,
    alone: list[list[int]],
    depth: int,
    preempts_every: int,
    min_forced: int,
    max_tokens: int,
    has_logprobs: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("aioengine.constraints.grammars._MIN_IN_BACKGROUND", 2)
    world = make_world(folder, depth=depth, min_forced=min_forced, max_tokens=max_tokens)
    if has_logprobs:  # such a step follows its constraints when it is launched
        world.submit([3, 4], SAMPLINGS[0], max_new_tokens=30, logprobs=LogprobRules(num_top=1))
    uids = answer_all(world, preempts_every)
    assert [world.outputs[uid] for uid in uids] == alone
    complete = [uid for uid, ended in world.ended.items() if ended.code is FinishCode.STOP]
    assert len(complete) > 4
    for index, uid in enumerate(uids):
        text = text_of(world.outputs[uid]) if uid in complete else ""
        if not text:
            continue
        if index % 4 == 0:
            jsonschema.validate(json.loads(text), SCHEMA)
        elif index % 4 == 1:
            assert re.fullmatch("[a-d]{3,30}!", text)
        else:
            assert text in ("abcab", "abd", "c")


class MaskedGraphs:
    """Replaces CUDA graphs on the CPU: masks are applied to logits, then tokens are drawn by temperature."""

    max_rows = 16

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.num_drawn = 0
        self.num_expanded = 0

    def padded(self, num_rows: int) -> int:
        return num_rows

    def fits(self, rows: StepRows, *, has_drafts: bool) -> bool:
        return can_expand(rows)

    def replay(self, rows: StepRows, sampled: SampledRows, *, when_ready: Callable[[], None]) -> SimpleNamespace:
        when_ready()
        runner = self._runner
        inputs, batch = runner._inputs.build(runner._model, rows, None, num_outputs=int(rows.token_ends[-1]))
        self.num_expanded += bool(rows.known_ids.size)
        runner._attention.prepare(batch)
        hidden = runner._model.forward(inputs, runner._attention)
        return SimpleNamespace(hidden=hidden, sampled=sampled, token_ids=None, masked=(rows.token_ends - 1).tolist())

    def logits(self, step: SimpleNamespace) -> torch.Tensor:
        return self._runner._model.compute_logits(step.hidden)

    def draw(self, step: SimpleNamespace, logits: torch.Tensor) -> torch.Tensor:
        self.num_drawn += 1
        records = step.sampled.records.copy()
        records["processors"] = 0
        rows = dataclasses.replace(step.sampled, records=records)
        token_ids = self._runner._sampler.sample(logits[step.masked], rows)
        self._runner._table.write_tokens(rows, token_ids)
        return token_ids


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(
    ("regex", "lists"),
    [
        ("a[bc]!", {"allowed_token_ids": A_AND_X}),
        ("[ab]{9}", {"allowed_token_ids": A_AND_X, "bad_token_ids": (A_AND_X[:1],)}),
    ],
)
def test_grammar_that_token_lists_empty_is_an_error_of_the_request(
    folder: Path, alone: list[list[int]], depth: int, regex: str, lists: dict[str, Any]
) -> None:
    world = make_world(folder, depth=depth)
    stuck = world.submit(PROMPTS[0], Sampling(0, grammar=grammar_of(regex=regex), **lists), max_new_tokens=40)
    assert world.answers(PROMPTS[:1], SAMPLINGS[:1], max_new_tokens=40) == alone[:1]
    names = "allowed_token_ids and bad_words" if "bad_token_ids" in lists else "allowed_token_ids"
    end = world.ended[stuck]
    assert end.message == f"no token is allowed by {names} and regex={regex!r} together; allow one more"
    error = answers.error(end)
    assert isinstance(error, RequestError)
    assert (error.stage, error.status_code) == ("no_token", 400)


@pytest.mark.parametrize(
    ("depth", "preempts_every"), [(0, 0), (2, 3), *(pytest.param(1, every, marks=pytest.mark.slow) for every in (0, 4))]
)
def test_answers_with_masks_in_graphs_are_the_same(
    folder: Path, alone: list[list[int]], depth: int, preempts_every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aioengine.constraints.grammars._MIN_IN_BACKGROUND", 2)
    world = make_world(folder, depth=depth, min_forced=2)
    graphs = MaskedGraphs(world.runner)
    monkeypatch.setattr(world.runner, "_graphs", graphs)
    uids = answer_all(world, preempts_every)
    assert [world.outputs[uid] for uid in uids] == alone
    assert graphs.num_drawn > 10
    assert graphs.num_expanded > 2


class Answer(NamedTuple):
    """Return the answer of one request, and the number of its steps."""

    ids: list[int]
    code: FinishCode
    num_steps: int


def answer_of(
    folder: Path,
    regex: str,
    *,
    depth: int,
    min_forced: int,
    max_tokens: int = 1_000,
    max_new_tokens: int = 60,
    logprobs: LogprobRules | None = None,
    sampling: Sampling | None = None,
) -> Answer:
    world = make_world(folder, depth=depth, min_forced=min_forced, max_tokens=max_tokens)
    sampling = replace(sampling or Sampling(5, temperature=1.0), grammar=grammar_of(regex=regex))
    uid = world.submit([1, 2, 3], sampling, max_new_tokens=max_new_tokens, logprobs=logprobs)
    world.run()
    assert not world.ended[uid].message
    return Answer(world.outputs[uid], world.ended[uid].code, world.core.scheduler.stats(0.0).num_steps)


@pytest.mark.parametrize(("end", "depth"), grid([("",), ("[cd]",)], [(0,), (1,), (2,)]))
def test_forced_tokens_take_no_steps_of_their_own(folder: Path, end: str, depth: int) -> None:
    regex = "[ab]hello, these words are forced" + end
    plain = answer_of(folder, regex, depth=depth, min_forced=NOT_FORCED)
    jumped = answer_of(folder, regex, depth=depth, min_forced=4)
    assert re.fullmatch(regex, text_of(plain.ids))
    assert jumped[:2] == plain[:2]
    assert jumped.code is FinishCode.STOP
    num_forced = len(plain.ids) - 1 - bool(end)
    assert num_forced > 10
    in_vain = depth if end else 0  # in flight when the forced tokens are known
    assert plain.num_steps - jumped.num_steps == num_forced - in_vain
    assert answer_of(folder, regex, depth=depth, min_forced=4, max_tokens=8)[:2] == plain[:2]
    for max_new_tokens in (2, num_forced, num_forced + 1):
        plain = answer_of(folder, regex, depth=depth, min_forced=NOT_FORCED, max_new_tokens=max_new_tokens)
        jumped = answer_of(folder, regex, depth=depth, min_forced=4, max_new_tokens=max_new_tokens)
        assert jumped[:2] == plain[:2]


def test_steps_of_more_rows_need_more_forced_tokens(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    regex = "[ab]hello, these words are forced"
    monkeypatch.setattr(constrained_rows, "ROWS_PER_TOKEN", 1)  # one token more in a step of one row
    num_steps = answer_of(folder, regex, depth=0, min_forced=NOT_FORCED).num_steps
    num_forced = num_steps - 1
    assert answer_of(folder, regex, depth=0, min_forced=num_forced).num_steps == num_steps
    assert answer_of(folder, regex, depth=0, min_forced=num_forced - 1).num_steps == 1


@pytest.mark.parametrize(
    ("sampling", "logprobs"),
    [
        (Sampling(5), LogprobRules(num_top=1)),
        (Sampling(5, hidden_states=LAST_STATES), None),
        (Sampling(5, frequency_penalty=0.5), None),
        (Sampling(5, repetition_penalty=1.5), None),
        (Sampling(5, allowed_token_ids=tuple(range(300))), None),
        (Sampling(5, bad_token_ids=((5, 7),)), None),
        (Sampling(5, min_new_tokens=3, suppressed_token_ids=(0,)), None),
    ],
)
def test_rows_that_need_all_logits_use_no_forced_tokens(
    folder: Path, sampling: Sampling, logprobs: LogprobRules | None
) -> None:
    regex = "hello, these words are forced"
    plain = answer_of(folder, regex, depth=1, min_forced=NOT_FORCED, sampling=sampling, logprobs=logprobs)
    assert answer_of(folder, regex, depth=1, min_forced=4, sampling=sampling, logprobs=logprobs) == plain
    assert plain.num_steps >= len(plain.ids)


class Fixed:
    """A constraint with masks that the test chooses."""

    is_complete = False

    def __init__(self, allowed: list[int], *, num_words: int, error: str = "") -> None:
        self.allowed = allowed
        self.num_words = num_words
        self.error = ""
        self.next_token = allowed[0] if len(allowed) == 1 else -1
        self._later = error

    @property
    def source(self) -> Fixed:
        return self

    @property
    def is_over(self) -> bool:
        return bool(self.error)

    def advance(self, token_id: int) -> None: ...

    def copy(self) -> Fixed:
        return self

    def take_forced(self, at_least: int, at_most: int) -> list[int]:
        return []

    def open(self, grammar: Grammar, token_ids: object, num_prompt: int) -> Fixed:
        return self

    def fill(self, constraints: list[Fixed], masks: np.ndarray[tuple[int, int], np.dtype[np.int32]]) -> None:
        bits = np.zeros((len(constraints), 32 * self.num_words), dtype=np.uint8)
        for row, constraint in enumerate(constraints):
            bits[row, constraint.allowed] = 1
            constraint.error = constraint._later
        masks[:] = np.packbits(bits, axis=1, bitorder="little").view(np.int32)


@pytest.mark.parametrize("width", [70, 96, 128])
def test_masks_forbid_all_other_tokens_of_their_rows(width: int) -> None:
    logits = torch.randn(200, width)
    expected = logits.clone()
    rows: list[LogitsRow] = []
    for index in range(200):
        if index % 3:
            allowed = [index % 70, 0, 31, 32, 63] if index % 5 else [index % 70]
            is_bad = index % 7 == 0 and len(allowed) > 1
            constraint = Fixed(allowed, num_words=3, error="too much" if is_bad else "")
            request = RequestRow(index, index, Sampling(0), 1, constraint=constraint)  # type: ignore[arg-type]
            rows.append(LogitsRow(index, request, 2))
            if not is_bad:
                kept = expected[index, allowed].clone()
                expected[index, :96] = -torch.inf
                expected[index, allowed] = kept
    GrammarMask().apply(logits, rows, torch.from_numpy)  # type: ignore[arg-type]
    assert torch.equal(logits, expected)


PROGRAM = """
import torch
from aioengine.kernels.triton.logits import mask

torch.manual_seed(0)
for num_tokens in (64, 2048, 2100, 5000):
    num_words = -(-num_tokens // 32)
    words = torch.randint(-2**31, 2**31, (3, num_words), dtype=torch.int64).to(torch.int32)
    storage = torch.randn(6, num_tokens + 7)
    logits = storage[:, :num_tokens]
    before = logits.clone()
    mask(logits, torch.tensor([[4, -1], [2, 33], [0, -3], [3, -2]], dtype=torch.int32), words)
    bits = (words[:, :, None] >> torch.arange(32)) & 1
    is_banned = torch.zeros(6, num_tokens, dtype=torch.bool)
    is_banned[[4, 3, 0]] = bits.flatten(1)[:, :num_tokens] == 0
    is_banned[2] = torch.arange(num_tokens) != 33
    assert torch.equal(logits, before.masked_fill(is_banned, -torch.inf))
"""


def test_kernel_masks_the_excluded_tokens() -> None:
    run_interpreted(PROGRAM)

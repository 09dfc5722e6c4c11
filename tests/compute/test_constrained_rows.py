"""Grammars in the runner: exact at every depth of overlap, in any batch and through preemption; and the masks."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import jsonschema
import numpy as np
import pytest
import torch

from aioengine.grammars import Grammars
from aioengine.protocol.messages import FinishCode, Grammar, Sampling
from aioengine.runner.logits import LogitsRow
from aioengine.runner.logits.grammar import GrammarMask
from tests.compute.interpreted import run_interpreted
from tests.compute.runner_world import VOCAB_SIZE, World, make_settings, save_model
from tests.kit.grammar_walks import FOLDER, grammar_of, text_of

if TYPE_CHECKING:
    from pathlib import Path

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"type": "integer"}, "maxItems": 3}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
GRAMMARS = [grammar_of(json_schema=SCHEMA), grammar_of(regex="[a-d]{3,30}!"), grammar_of(choice=["abcab", "abd", "c"])]
SAMPLINGS = [
    Sampling(index, temperature=1.0, grammar=GRAMMARS[index % 4] if index % 4 < 3 else None) for index in range(10)
]
PROMPTS = [[index + 1] * (index + 3) for index in range(10)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_model("llama", path)
    return path


def make_world(folder: Path, *, depth: int) -> World:
    world = World(make_settings(folder, depth=depth, chunk_tokens=64))
    world.runner.use_grammars(Grammars(str(FOLDER), VOCAB_SIZE))
    return world


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[list[int]]:
    world = make_world(folder, depth=0)
    return [
        world.answers([prompt], [sampling], max_new_tokens=40)[0]
        for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=True)
    ]


@pytest.mark.parametrize(("depth", "preempts_every"), [(0, 0), (1, 0), (2, 0), (0, 4), (1, 4)])
def test_answers_are_those_of_each_alone(
    folder: Path, alone: list[list[int]], depth: int, preempts_every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aioengine.grammars._MIN_BESIDE", 2)
    world = make_world(folder, depth=depth)
    uids = [
        world.submit(prompt, sampling, max_new_tokens=40) for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=True)
    ]
    num_steps = 0
    while world.core.has_work:
        world.step()
        num_steps += 1
        if preempts_every and num_steps % preempts_every == 0 and world.core.requests.running:
            world.core.requests.preempt()
    assert [world.outputs[uid] for uid in uids] == alone
    complete = [uid for uid, ended in world.ended.items() if ended.code is FinishCode.STOP]
    assert len(complete) > 4
    for uid in complete:
        text = text_of(world.outputs[uid])
        if uid % 4 == 0:
            jsonschema.validate(json.loads(text), SCHEMA)
        elif uid % 4 == 1:
            assert re.fullmatch("[a-d]{3,30}!", text)
        else:
            assert text in ("abcab", "abd", "c")


def test_a_grammar_that_cannot_be_followed_fails_its_request_alone(folder: Path) -> None:
    world = make_world(folder, depth=1)
    bad = world.submit([1, 2], Sampling(1, temperature=1.0, grammar=Grammar("regex", "(")))
    good = world.submit([1, 2], SAMPLINGS[2])
    world.run()
    assert world.ended[bad].code is FinishCode.FAILED
    assert "cannot be enforced" in world.ended[bad].message
    assert text_of(world.outputs[good]) in ("abcab", "abd", "c")


class Fixed:
    """A constraint with masks that the test chooses."""

    is_complete = False

    def __init__(self, allowed: list[int], *, num_words: int, error: str = "") -> None:
        self.allowed = allowed
        self.num_words = num_words
        self.error = ""
        self._later = error

    @property
    def source(self) -> Fixed:
        return self

    @property
    def is_over(self) -> bool:
        return bool(self.error)

    def advance(self, token_id: int) -> None: ...

    def open(self, grammar: Grammar, token_ids: object, num_prompt: int) -> Fixed:
        return self

    def fill(self, constraints: list[Fixed], masks: np.ndarray[tuple[int, int], np.dtype[np.int32]]) -> None:
        bits = np.zeros((len(constraints), 32 * self.num_words), dtype=np.uint8)
        for row, constraint in enumerate(constraints):
            bits[row, constraint.allowed] = 1
            constraint.error = constraint._later
        masks[:] = np.packbits(bits, axis=1, bitorder="little").view(np.int32)


@pytest.mark.parametrize("width", [70, 96, 128])
def test_masks_rule_out_all_other_tokens_of_their_rows(width: int) -> None:
    logits = torch.randn(200, width)
    expected = logits.clone()
    rows: list[LogitsRow] = []
    for index in range(200):
        if index % 3:
            allowed = [index % 70, 0, 31, 32, 63]
            is_bad = index % 7 == 0
            constraint = Fixed(allowed, num_words=3, error="too much" if is_bad else "")
            rows.append(LogitsRow(index, Sampling(0), 1, 2, None, constraint=constraint))
            if not is_bad:
                kept = expected[index, allowed].clone()
                expected[index, :96] = -torch.inf
                expected[index, allowed] = kept
    GrammarMask().apply(logits, rows, torch.from_numpy)  # type: ignore[arg-type]
    assert torch.equal(logits, expected)


PROGRAM = """
import torch
from aioengine.kernels.triton.grammar_mask import mask

torch.manual_seed(0)
for num_tokens in (64, 2048, 2100, 5000):
    num_words = -(-num_tokens // 32)
    words = torch.randint(-2**31, 2**31, (3, num_words), dtype=torch.int64).to(torch.int32)
    storage = torch.randn(6, num_tokens + 7)
    logits = storage[:, :num_tokens]
    before = logits.clone()
    rows = torch.tensor([4, 0, 3])
    mask(logits, rows, words)
    bits = (words[:, :, None] >> torch.arange(32)) & 1
    is_banned = torch.zeros(6, num_tokens, dtype=torch.bool)
    is_banned[rows] = bits.flatten(1)[:, :num_tokens] == 0
    assert torch.equal(logits, before.masked_fill(is_banned, -torch.inf))
"""


def test_the_kernel_sets_what_the_masks_rule_out() -> None:
    run_interpreted(PROGRAM)

"""The user's logits processors: rows are processed together, and a failure affects only its row."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import msgspec
import pytest

from aioengine.protocol.messages import FinishCode, Sampling
from aioengine.runner.build import build
from aioengine.runner.custom_processors import CustomProcessors
from tests.compute.runner_world import World, make_settings, save_model
from tests.kit.processors import ADD, BROKEN, FORCE, NAMES
from tests.kit.tiny_sizes import VOCAB_SIZE

if TYPE_CHECKING:
    from pathlib import Path

    from aioengine.settings.config import Settings

PROMPTS = [[1, 2, 3], [50, 60], [7, 8, 9, 10, 11], [99]]
PLAIN = [Sampling(0, temperature=0.0), Sampling(1, top_p=0.9), Sampling(2, repetition_penalty=1.3), Sampling(3)]


def custom(name: str, seed: int = 0, temperature: float = 1.0, **params: object) -> Sampling:
    given = json.dumps(params).encode() if params else b""
    return Sampling(seed, temperature=temperature, custom_processor=name, custom_params=given)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model("qwen3", folder)
    return folder


def settings_of(folder: Path, *, num_pages: int = 256, depth: int = 0) -> Settings:
    settings = make_settings(folder, num_pages=num_pages, depth=depth)
    runner = msgspec.structs.replace(settings.runner, logits_processors=tuple(NAMES))
    return msgspec.structs.replace(settings, runner=runner)


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[list[int]]:
    return World(settings_of(folder)).answers(PROMPTS, PLAIN)


@pytest.mark.parametrize("depth", [0, 1])
def test_each_row_gets_its_own_processor_and_parameters(folder: Path, plain: list[list[int]], depth: int) -> None:
    samplings = [custom(FORCE, token=5), custom(FORCE, 1, 0.0, token=9), custom(BROKEN), custom(ADD, token=3, bias=0.0)]
    answers = World(settings_of(folder, depth=depth)).answers(PROMPTS + PROMPTS, samplings + PLAIN)
    assert answers[:2] == [[5] * 12, [9] * 12]
    assert answers[4:] == plain
    unchanged = World(settings_of(folder)).answers(PROMPTS[3:], [Sampling(0)])
    assert answers[3:4] == unchanged


def test_bias_of_a_custom_processor_equals_logit_bias(folder: Path) -> None:
    expected = World(settings_of(folder)).answers(
        PROMPTS, [Sampling(seed, bias_token_ids=(11,), logit_bias=(2.5,)) for seed in range(4)], max_new_tokens=40
    )
    samplings = [custom(ADD, seed, token=11, bias=2.5) for seed in range(4)]
    world = World(settings_of(folder, num_pages=20))
    assert world.answers(PROMPTS, samplings, max_new_tokens=40) == expected
    assert world.num_preemptions > 0


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", f"custom_logit_processor '{BROKEN}' failed at processors.py:[1-9][0-9]+: KeyError: 'missing'"),
        ("surrogate", r"ValueError: \\ud800$"),
        ("long", r"ValueError: x{4000,4100}\.\.\. \(1000012 characters\)$"),
        ("message", r"UnprintableError \(its message raised KeyError\)$"),
        ("none", f"custom_logit_processor '{BROKEN}' failed: TypeError: it returned NoneType, not the logits"),
        ("shape", rf"ValueError: it returned logits of the shape \[1, {VOCAB_SIZE - 1}\], not \[1, {VOCAB_SIZE}\]"),
        ("rows", r"ValueError: it returned logits of the shape \[0, "),
        ("dtype", "TypeError: it returned torch.float64 on cpu, not torch.float32 on cpu"),
        ("nan", "non-finite values .* custom_logit_processor .* returned them"),
        ("nothing", "non-finite values .* custom_logit_processor .* returned them"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_fails_ends_alone(
    folder: Path, plain: list[list[int]], how: str, message: str, temperature: float
) -> None:
    world = World(settings_of(folder))
    good = [world.submit(PROMPTS[0], custom(BROKEN, 0, temperature)) for _ in range(2)]
    bad = world.submit(PROMPTS[1], custom(BROKEN, 0, temperature, how=how))
    assert world.answers(PROMPTS, PLAIN) == plain
    assert world.ended[bad].code is FinishCode.FAILED
    assert world.outputs[bad] == []
    assert re.search(message, world.ended[bad].message)
    if how not in ("nan", "nothing"):  # without an exception, the processor also changes the other rows
        assert [world.ended[uid].code for uid in good] == [FinishCode.LENGTH] * 2
    assert world.runner._custom.errors == {}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tests.kit.nothing:Force", "cannot be created: ModuleNotFoundError: No module named 'tests.kit.nothing'"),
        (
            "tests.kit.processors:Nothing",
            "does not exist; classes with apply in tests.kit.processors: Force, Add, Broken$",
        ),
        ("tests.kit.processors:NoProcessor", r"has no method apply\(logits, params\)"),
        ("tests.kit.processors:FORCE", "is not a class but 'tests.kit.processors:Force'; classes with apply"),
        ("tests.kit.waiting:None", "does not exist; classes with apply in tests.kit.waiting: none$"),
    ],
)
def test_start_fails_if_a_name_is_no_processor(folder: Path, name: str, message: str) -> None:
    settings = settings_of(folder)
    runner = msgspec.structs.replace(settings.runner, logits_processors=(name,))
    with pytest.raises(ValueError, match=f"^logits_processors: '{name}' {message}"):
        build(msgspec.structs.replace(settings, runner=runner), lambda _: None)


def test_engine_without_custom_processors() -> None:
    assert not CustomProcessors((), vocab_size=10).wants(Sampling(0))

"""README tells the truth about names: every constructor argument and every file of the story of a request."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from aioengine.args import ARGUMENTS
from aioengine.frontend.info import Health
from aioengine.testing.fake_engine import fake_engine

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ARGUMENTS)
def test_every_constructor_argument_is_in_the_table_with_its_default(name: str) -> None:
    assert f"| `{name}` | {ARGUMENTS[name].help} | {ARGUMENTS[name].default_text} |" in README


def test_every_counter_and_every_state_is_explained() -> None:
    with fake_engine() as engine:
        counters = engine.stats()
    explained = README.partition("## What can be watched\n")[2].partition("\n## ")[0]
    assert {name for name in counters if f"`{name}`" not in explained} == set()
    states = set(re.findall(r'"(\w+)"', Health.__doc__ or ""))
    assert "recovering" in states
    assert {state for state in states if f"`{state}`" not in explained} == set()


def test_the_files_of_the_story_exist() -> None:
    steps = re.findall(r"^\| \d \| `([^`]+)` \|", README, flags=re.MULTILINE)
    assert len(steps) == 9
    assert [step for step in steps if not (ROOT / "aioengine" / step).is_file()] == []


def test_the_first_two_shell_lines_install_and_run_and_test() -> None:
    blocks = re.findall(r"^```(?:sh|bash|shell)\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.strip()]
    assert re.fullmatch(r'pip install \. && aioengine generate "[^"]+"', lines[0])
    assert lines[1] == "pip install '.[test]' && pytest"

from __future__ import annotations

import pytest

from aioengine.constraints.endless_rules import endless_rule


@pytest.mark.parametrize(
    ("alternatives", "expected"),
    [
        ({"start": [["x"]]}, None),
        ({"start": [["x", "start"], []]}, None),
        ({"start": [["x", "start"]]}, "start"),
        ({"start": [["a"]], "a": [["b", "x"]], "b": [["a"]]}, "a"),
        ({"start": [["a"]], "a": [["b"], ["x"]], "b": [["b"]]}, None),
        ({"start": [["x"]], "unused": [["unused"]]}, None),
    ],
)
def test_endless_rule_is_the_one_that_keeps_the_start_from_ending(
    alternatives: dict[str, list[list[str]]], expected: str | None
) -> None:
    assert endless_rule(alternatives, "start") == expected

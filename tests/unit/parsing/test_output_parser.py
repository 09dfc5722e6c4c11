"""Reasoning and tool calls that are found in texts, for every way to cut the texts into pieces."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioengine.parsing import Content, OutputFormat, ToolArguments, ToolCallBegin, output_format
from tests.unit.parsing.events import TOOLS, cut_up, parsed

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
OSLO = ("call", "get_weather", '{"city": "Oslo"}')


def form_of(tool_parser: str | None, reasoning_parser: str | None = None) -> OutputFormat:
    return output_format(tool_parser=tool_parser, reasoning_parser=reasoning_parser)


FRAGMENTS = {
    "hermes": [
        "<tool_call>", "</tool_call>", "\n", CALL, '{"name": "f", "arguments": {', '"a": "x\\"</tool_call>{"', "}}",
        "}", '{"arguments": {}, "name": "g"}', '{"name": "h"}', "<think>", "</think>", "<", "hi ", "\\", '"',
    ],
}  # fmt: skip
"""Tool parser -> pieces of texts that it reads."""


@pytest.mark.parametrize("name", FRAGMENTS)
def test_events_do_not_depend_on_the_pieces(name: str) -> None:
    form = form_of(name, "think")

    @given(st.lists(st.sampled_from(FRAGMENTS[name]), max_size=12), st.lists(st.integers(0, 300), max_size=12))
    def check(fragments: list[str], cuts: list[int]) -> None:
        text = "".join(fragments)
        whole = parsed(form, [text])
        assert parsed(form, text) == whole
        assert parsed(form, cut_up(text, cuts)) == whole

    check()


@pytest.mark.parametrize("name", FRAGMENTS)
def test_every_cut_of_a_text_gives_the_same_events(name: str) -> None:
    form = form_of(name)
    text = "".join(FRAGMENTS[name])
    whole = parsed(form, [text])
    assert all(parsed(form, [text[:cut], text[cut:]]) == whole for cut in range(len(text)))


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (CALL, [OSLO]),
        (f"Sure.\n{CALL}\n{CALL}\n", [("content", "Sure."), OSLO, OSLO]),
        (f"{CALL}\nDone.", [OSLO, ("content", "Done.")]),
        ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', [("call", "f", '{"a": 1}')]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [("call", "f", '{"a": 1}')]),
        ('<tool_call>{"name": "f"}</tool_call>', [("call", "f", "{}")]),
        (
            '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>',
            [("call", "f", '{"a": "</tool_call>"}')],
        ),
        ('<tool_call>{"name": "f", "arguments": {"a": "b', [("call", "f", '{"a": "b')]),
        ("<tool_call>get_weather</tool_call>", [("content", "<tool_call>get_weather</tool_call>")]),
        ('<tool_call>{"nam": "f"}</tool_call> a', [("content", '<tool_call>{"nam": "f"}</tool_call> a')]),
        (f"<tool_call>{CALL}", [("content", "<tool_call>"), OSLO]),
        ("a <tool_cal b <", [("content", "a <tool_cal b <")]),
    ],
)
def test_hermes_calls(text: str, parts: list[Any]) -> None:
    assert parsed(form_of("hermes"), text) == parts


@pytest.mark.parametrize(
    ("prompt", "text", "parts"),
    [
        ("", "<think>\nHm.\n</think>\n\nHi.", [("reasoning", "Hm."), ("content", "Hi.")]),
        ("", "Hi. <think>", [("content", "Hi. <think>")]),
        ("...<think>\n", "Hm.\n</think>\n\nHi.", [("reasoning", "Hm."), ("content", "Hi.")]),
        ("<think>", "<think>Hm.</think>Hi.", [("reasoning", "Hm."), ("content", "Hi.")]),
        ("<think>", "Hm. </thin", [("reasoning", "Hm. </thin")]),
        ("<think>\n\n</think>\n\n", "Hi.", [("content", "Hi.")]),
        ("<think>", f"I call.</think>\n{CALL}", [("reasoning", "I call."), OSLO]),
        ("<think>", f"{CALL}</think>", [("reasoning", CALL)]),
    ],
)
def test_reasoning_between_tags(prompt: str, text: str, parts: list[Any]) -> None:
    assert parsed(form_of("hermes", "think"), text, prompt=prompt) == parts


def test_text_comes_out_as_soon_as_it_cannot_begin_a_tag() -> None:
    parser = form_of("hermes").parser(tools=TOOLS)
    assert parser.push("a <tool") == [Content("a")]
    assert parser.push("s>") == [Content(" <tools>")]
    assert parser.push('<tool_call>{"name": "f", "arguments": ') == []
    assert parser.push('{"a') == [ToolCallBegin(0, "f"), ToolArguments(0, "{"), ToolArguments(0, '"a')]
    assert parser.push("b") == [ToolArguments(0, "b")]


def test_calls_are_content_without_tools_or_without_a_parser() -> None:
    assert parsed(form_of("hermes"), CALL, tools=[]) == [("content", CALL)]
    assert parsed(form_of(None), CALL) == [("content", CALL)]

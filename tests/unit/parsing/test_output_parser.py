"""Reasoning and tool calls that are found in texts, for every way to cut the texts into pieces."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from aioengine.parsing import Content, OutputFormat, ToolArguments, ToolCallBegin, output_format
from tests.kit.pieces import cut_up
from tests.unit.parsing.events import TOOLS, parsed

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
OSLO = ("call", "get_weather", '{"city": "Oslo"}')


def form_of(tool_parser: str | None, reasoning_parser: str | None = None) -> OutputFormat:
    return output_format(tool_parser=tool_parser, reasoning_parser=reasoning_parser)


CITY = '{"city": "Oslo"}'
CODER = "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"
DEEPSEEK = (
    f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{CITY}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
HARMONY = f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{CITY}"
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"

FRAGMENTS = {
    "hermes": [
        "<tool_call>", "</tool_call>", "\n", CALL, '{"name": "f", "arguments": {', '"a": "x\\"</tool_call>{"', "}}",
        "}", '{"arguments": {}, "name": "g"}', '{"name": "h"}', "<think>", "</think>", "<", "hi ", "\\", '"',
    ],
    "qwen3_coder": [
        CODER, "<tool_call>", "\n", "<function=get_weather>", "<parameter=city>", "<parameter=days>", "</parameter>",
        "</function>", "</tool_call>", "3", "True", "é\"", "<", "<think>", "</think>",
    ],
    "llama3": [
        "<|python_tag|>", '{"name": "get_weather", "parameters": {', '"a": "{"', "}}", "; ", '{"name": "f"}', " hi",
        '{"type": "function", "name": "get_time", "parameters": {}}', '{"a": 1}', "<think>", "</think>", "<", "{",
    ],
    "mistral": [
        "[TOOL_CALLS]", "[", "]", " ", ", ", '{"name": "f", "arguments": {"a": 1}, "id": "abc"}', "get_time[ARGS]{",
        '"a": []', "}", "f[CALL_ID]x1[ARGS]{}", '{"arguments": "{}", "name": "f"}', "<think>", "</think>", "[TOOL",
        "hi",
    ],
    "deepseek_v3": [
        DEEPSEEK, "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "function<｜tool▁sep｜>f\n```json\n{",
        "f<｜tool▁sep｜>{",
        '"a": "`"', "}", "\n```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "hi", "\n", "<think>", "</think>",
    ],
    "gpt_oss": [
        THOUGHT, HARMONY, "<|channel|>final<|message|>", "<|channel|>commentary<|message|>", "<|end|>", "<|call|>",
        "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{", "}", '"a": "<|end|>"', "hi", " to=",
        "<|channel|>analysis to=python code<|message|>", "<|", "<|message|>",
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
        (f"{CALL.removesuffix('ool_call>')}", [OSLO]),
        (f"{CALL}\n<b", [OSLO, ("content", "<b")]),
        ("<tool_call>get_weather</tool_call>", [("content", "<tool_call>get_weather</tool_call>")]),
        ('<tool_call>{"nam": "f"}</tool_call> a', [("content", '<tool_call>{"nam": "f"}</tool_call> a')]),
        (f"<tool_call>{CALL}", [("content", "<tool_call>"), OSLO]),
        ("a <tool_cal b <", [("content", "a <tool_cal b <")]),
    ],
)
def test_hermes_calls(text: str, parts: list[Any]) -> None:
    assert parsed(form_of("hermes"), text) == parts


TYPED = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "properties": {
                "text": {"type": "string"},
                "both": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "flag": {"type": "boolean"},
                "choice": {"enum": ["1", "2"]},
            }
        },
    },
}


def coder(**values: str) -> str:
    arguments = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
    return f"<tool_call>\n<function=f>\n{arguments}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (CODER, [OSLO]),
        (f"Sure.\n\n{CODER}\n{CODER}", [("content", "Sure."), OSLO, OSLO]),
        (CODER.removeprefix("<tool_call>\n"), [OSLO]),
        (coder(), [("call", "f", "{}")]),
        (coder(text='a"b\nc', n="5"), [("call", "f", '{"text": "a\\"b\\nc", "n": 5}')]),
        (coder(text="5", both="5", n="[1]"), [("call", "f", '{"text": "5", "both": "5", "n": [1]}')]),
        (coder(both="null", flag="True", n="x"), [("call", "f", '{"both": null, "flag": true, "n": "x"}')]),
        (coder(both="NaN", n="Infinity"), [("call", "f", '{"both": "NaN", "n": "Infinity"}')]),
        (coder(choice="1", text=""), [("call", "f", '{"choice": "1", "text": ""}')]),
        ("<function=f> is a tag", [("content", "<function=f> is a tag")]),
        ("<tool_call>{}</tool_call>", [("content", "<tool_call>{}</tool_call>")]),
        ("<function=f><parameter=text>\nab", [("call", "f", '{"text": "ab')]),
        ("<function=f><parameter=n>12", [("call", "f", '{"n": 12')]),
        ("<function=f><parameter=n>1</parameter>x", [("call", "f", '{"n": 1}'), ("content", "x")]),
    ],
)
def test_qwen3_coder_calls(text: str, parts: list[Any]) -> None:
    assert parsed(form_of("qwen3_coder"), text, tools=[TYPED]) == parts


def test_types_of_an_unsupported_schema_decide_which_values_are_strings() -> None:
    properties = {"text": {"type": "string", "not": {}}, "wrong": {"type": 5, "anyOf": 5}}
    tools = [{"name": "f", "parameters": {"properties": properties}}]
    text = coder(text="5", n="5", wrong="5")
    assert parsed(form_of("qwen3_coder"), text, tools=tools) == [("call", "f", '{"text": "5", "n": 5, "wrong": 5}')]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (f'{{"name": "get_weather", "parameters": {CITY}}}', [OSLO]),
        (f'<|python_tag|>{{"name": "get_weather", "parameters": {CITY}}}', [OSLO]),
        (f'{{"name": "get_weather", "parameters": {CITY}}}; {{"name": "get_time", "arguments": {{}}}}',
         [OSLO, ("call", "get_time", "{}")]),
        (f'{{"type": "function", "name": "get_weather", "parameters": {CITY}}}', [OSLO]),
        (f'Sure. <|python_tag|>{{"name": "get_weather", "parameters": {CITY}}}', [("content", "Sure."), OSLO]),
        ('{"name": "Ada", "parameters": {}}', [("content", '{"name": "Ada", "parameters": {}}')]),
        ('{"a": 1}', [("content", '{"a": 1}')]),
        ('Say {"name": "get_time", "parameters": {}}', [("content", 'Say {"name": "get_time", "parameters": {}}')]),
        ('<|python_tag|>search.call("x")', [("content", '<|python_tag|>search.call("x")')]),
    ],
)  # fmt: skip
def test_llama3_calls(text: str, parts: list[Any]) -> None:
    assert parsed(form_of("llama3"), text) == parts


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {CITY}}}]', [OSLO]),
        (f'a[TOOL_CALLS][{{"name": "get_weather", "arguments": {CITY}, "id": "abcdefghi"}}, {{"name": "f"}}]',
         [("content", "a"), OSLO, ("call", "f", "{}")]),
        (f"[TOOL_CALLS]get_weather[ARGS]{CITY}[TOOL_CALLS]get_time[ARGS]{{}}", [OSLO, ("call", "get_time", "{}")]),
        (f"[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{CITY}", [OSLO]),
        (f"[TOOL_CALLS]get_weather{CITY}", [OSLO]),
        ("[TOOL_CALLS] none", [("content", "[TOOL_CALLS] none")]),
        ("[TOOL_CALLS] [5]", [("content", "[TOOL_CALLS] [5]")]),
        ('[TOOL_CALLS][{"name": "f"}, 5]', [("call", "f", "{}"), ("content", ", 5]")]),
    ],
)  # fmt: skip
def test_mistral_calls(text: str, parts: list[Any]) -> None:
    assert parsed(form_of("mistral"), text) == parts


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (f"Sure.{DEEPSEEK}", [("content", "Sure."), OSLO]),
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
            f"{CITY}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time\n```json\n"
            "{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            [OSLO, ("call", "get_time", "{}")],
        ),
        ("<｜tool▁call▁begin｜>get_time", [("content", "<｜tool▁call▁begin｜>get_time")]),
    ],
)
def test_deepseek_calls(text: str, parts: list[Any]) -> None:
    assert parsed(form_of("deepseek_v3"), text) == parts


FINAL = "<|channel|>final<|message|>Hi."


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (THOUGHT + FINAL, [("reasoning", "Hm."), ("content", "Hi.")]),
        (f"{THOUGHT}{FINAL}<|return|>", [("reasoning", "Hm."), ("content", "Hi.")]),
        (THOUGHT + HARMONY, [("reasoning", "Hm."), OSLO]),
        (f"{THOUGHT}<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{HARMONY}<|call|>",
         [("reasoning", "Hm."), ("content", "I look."), OSLO]),
        (f" to=functions.get_weather<|channel|>commentary json<|message|>{CITY}", [OSLO]),
        ("<|channel|>analysis to=python code<|message|>1 + 1", [("reasoning", "1 + 1")]),
        ("Hi.", [("content", "Hi.")]),
        ("<|channel|>commentary to=functions.f<|message|>x<|call|>",
         [("content", "<|channel|>commentary to=functions.f<|message|>x")]),
    ],
)  # fmt: skip
def test_gpt_oss_messages(text: str, parts: list[Any]) -> None:
    assert parsed(form_of("gpt_oss"), text) == parts


def test_gpt_oss_reasoning_without_tools() -> None:
    for form in (form_of("gpt_oss"), form_of(None, "gpt_oss")):
        assert parsed(form, THOUGHT + FINAL, tools=[]) == [("reasoning", "Hm."), ("content", "Hi.")]
        assert parsed(form, HARMONY, tools=[]) == [("content", CITY)]


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


BEGINS = ("<tool_call>", "<function=", "<|python_tag|>", "[TOOL_CALLS]", "<｜tool▁call▁begin｜>", "<|message|>")


@pytest.mark.parametrize("name", FRAGMENTS)
@given(pieces=st.lists(st.sampled_from([*(begin[:-1] for begin in BEGINS), "<", " \n", "{", '"', " to=x", "}", "hi"])))
def test_text_without_a_tag_is_unchanged(name: str, pieces: list[str]) -> None:
    text = "".join(pieces)
    assume(not any(begin in text for begin in BEGINS))
    assert parsed(form_of(name), pieces) == ([("content", text)] if text else [])


def test_mistral_reasoning_is_between_its_own_tags() -> None:
    form = form_of("mistral", "mistral_think")
    text = f"[THINK]Hm.[/THINK]Sure.[TOOL_CALLS]get_weather[ARGS]{CITY}"
    assert parsed(form, text) == [("reasoning", "Hm."), ("content", "Sure."), OSLO]


def test_text_is_returned_as_soon_as_it_cannot_start_a_tag() -> None:
    parser = form_of("hermes").parser(tools=TOOLS)
    assert parser.push("a <tool") == [Content("a")]
    assert parser.push("s>") == [Content(" <tools>")]
    assert parser.push('<tool_call>{"name": "f", "arguments": ') == []
    assert parser.push('{"a') == [ToolCallBegin(0, "f"), ToolArguments(0, "{"), ToolArguments(0, '"a')]
    assert parser.push("b") == [ToolArguments(0, "b")]


def test_calls_are_content_without_tools_or_without_a_parser() -> None:
    assert parsed(form_of("hermes"), CALL, tools=[]) == [("content", CALL)]
    assert parsed(form_of(None), CALL) == [("content", CALL)]


def test_string_arguments_are_returned_before_their_end() -> None:
    parser = form_of("qwen3_coder").parser(tools=TOOLS)
    parser.push("<tool_call>\n<function=get_weather>\n<parameter=city>\n")
    assert parser.push('a"') == [ToolArguments(0, 'a\\"')]
    assert parser.push("b\n") == [ToolArguments(0, "b")]


@pytest.mark.parametrize(
    ("name", "piece"),
    [
        ("hermes", '<tool_call>{"'),
        ("qwen3_coder", "<function=f><parameter=a>"),
        ("llama3", '<|python_tag|>{"'),
        ("mistral", '[TOOL_CALLS][{"'),
        ("deepseek_v3", "<｜tool▁call▁begin｜>"),
        ("gpt_oss", "<|channel|>x"),
    ],
)
def test_many_pieces_of_half_calls_take_linear_time(name: str, piece: str) -> None:
    started = time.thread_time()
    parsed(form_of(name), [piece] * 5_000)
    assert time.thread_time() - started < 3


def test_a_long_piece_of_half_calls_takes_linear_time() -> None:
    parser = form_of("mistral").parser(tools=TOOLS)
    started = time.thread_time()
    assert len(parser.push("[TOOL_CALLS] " * 50_000)) > 50_000 - 2
    assert time.thread_time() - started < 4

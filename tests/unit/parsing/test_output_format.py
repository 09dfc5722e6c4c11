"""The format that a chat template has, and the constraints of tool calls: random outputs of them are parsed."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from aioengine.errors import UnsupportedSchemaError
from aioengine.parsing import output_format
from tests.kit.special_tokens import accepts, compiled, encoded, grammars, walk
from tests.unit.parsing.events import TIME, TOOLS, parsed

TEMPLATES = {
    "hermes": (
        "{% if tools %}For each call, write <tool_call>\n{\"name\": <name>, \"arguments\": <args-json-object>}\n"
        "</tool_call>{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}",
        "hermes", None,
    ),
    "hermes with reasoning": (
        "{{- \"{\\\"name\\\": <function-name>, \\\"arguments\\\": <args-json-object>}\\n</tool_call>\" }}<tool_call>"
        "{% set content = message.content.split('</think>')[-1] %}",
        "hermes", "think",
    ),
    "tags for arguments": (
        "{{ '<tool_call>\n<function=' + call.name + '>\n' }}{{ '<parameter=' + key + '>\n' }}\"arguments\"",
        "qwen3_coder", None,
    ),
    "other tags": ("<tool_call>{{ call.name }}<arg_key>{{ key }}</arg_key></tool_call></think>", None, "think"),
    "llama": (
        "{{ '<|start_header_id|>assistant<|end_header_id|>' }}{{ '{\"name\": \"' + call.name + '\", ' }}"
        "{{ '\"parameters\": ' }}{{ call.arguments | tojson }}{{ \"}\" }}",
        "llama3", None,
    ),
    "mistral": ("{{ '[TOOL_CALLS] [' }}{{ call.function | tojson }}{{ ']' + eos_token }}", "mistral", None),
    "mistral with reasoning": ("[TOOL_CALLS]{{ name }}[ARGS][THINK]{{ text }}[/THINK]", "mistral", "mistral_think"),
    "deepseek": (
        "{{'<｜Assistant｜></think>'}}{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>'}}",
        "deepseek_v3", "think",
    ),
    "gpt-oss": ("<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>", "gpt_oss", "gpt_oss"),
    "plain": ("{% for m in messages %}[INST]{{ m.content }}[/INST]{% endfor %}", None, None),
}  # fmt: skip
"""Title -> part of a chat template, tool parser, reasoning parser."""

NAMED = {"type": "function", "function": {"name": "get_time"}}
PARSERS = ["hermes", "qwen3_coder", "llama3", "mistral", "deepseek_v3", "gpt_oss"]
CITY = '{"city": "Oslo"}'
TAGGED = f'<tool_call>\n{{"name": "get_weather", "arguments": {CITY}}}\n</tool_call>'
CALLS = {
    "hermes": TAGGED,
    "qwen3_coder": (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"
    ),
    "llama3": f'{{"name": "get_weather", "parameters": {CITY}}}',
    "mistral": f"[TOOL_CALLS]get_weather[ARGS]{CITY}",
    "deepseek_v3": (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{CITY}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>"
    ),
    "gpt_oss": f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{CITY}",
}
"""Tool parser -> a call of get_weather."""


@pytest.mark.parametrize("title", TEMPLATES)
def test_auto_chooses_by_the_chat_template(title: str) -> None:
    template, tool_parser, reasoning_parser = TEMPLATES[title]
    form = output_format(template)
    assert (form.tool_parser, form.reasoning_parser) == (tool_parser, reasoning_parser)
    none = output_format(template, tool_parser=None, reasoning_parser=None)
    assert (none.tool_parser, none.reasoning_parser) == (None, None)


def test_unknown_parser_is_refused_with_the_known_names() -> None:
    with pytest.raises(
        ValueError, match=r"tool_parser='herme' is not known \(did you mean 'hermes'\?\); allowed: auto"
    ):
        output_format(tool_parser="herme")
    with pytest.raises(ValueError, match="reasoning_parser='hermes' is not known; allowed: auto, gpt_oss, think"):
        output_format(reasoning_parser="hermes")


def grammar_of(params: dict[str, Any]) -> Any:
    return compiled(**{name: value for name, value in params.items() if name != "skip_special_tokens"})


def check_arguments(name: str, text: str) -> None:
    schema = next(tool["function"].get("parameters", {}) for tool in TOOLS if tool["function"]["name"] == name)
    jsonschema.validate(json.loads(text), {"type": "object", **schema})


@pytest.mark.parametrize(
    ("name", "reasoning"), [*((name, None) for name in PARSERS), ("hermes", "think"), ("mistral", "mistral_think")]
)
def test_required_calls_are_parsed_and_valid(name: str, reasoning: str | None) -> None:
    form = output_format(tool_parser=name, reasoning_parser=reasoning)
    grammar = grammar_of(form.sampling_params(TOOLS, tool_choice="required"))
    num_complete = 0
    for seed in range(12):
        text, is_complete = walk(grammar, seed)
        if is_complete:
            num_complete += 1
            parts = [part for part in parsed(form, text) if part[0] != "reasoning"]
            calls = [part for part in parts if part[0] == "call"]
            assert calls, text
            assert name == "gpt_oss" or parts == calls
            for _, called, arguments in calls:
                check_arguments(called, arguments)
    assert num_complete > 3


@pytest.mark.parametrize("name", PARSERS)
def test_a_named_function_is_called_once(name: str) -> None:
    form = output_format(tool_parser=name, reasoning_parser=None)
    grammar = grammar_of(form.sampling_params(TOOLS, tool_choice=NAMED))
    texts = [walk(grammar, seed) for seed in range(8)]
    calls = [[part for part in parsed(form, text) if part[0] == "call"] for text, is_complete in texts if is_complete]
    assert calls
    assert all(len(call) == 1 and call[0][1] == "get_time" and json.loads(call[0][2]) == {} for call in calls)


@pytest.mark.parametrize("name", PARSERS)
def test_auto_allows_text_and_valid_calls_only(name: str) -> None:
    form = output_format(tool_parser=name, reasoning_parser=None)
    grammar = grammar_of(form.sampling_params(TOOLS))
    before = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant" if name == "gpt_oss" else ""
    text = f"{before}<|channel|>final<|message|>Hi." if name == "gpt_oss" else "Hi."
    call = before + CALLS[name]
    assert parsed(form, call)[-1] == ("call", "get_weather", CITY)
    assert accepts(grammar, text)
    assert accepts(grammar, call)
    assert not accepts(grammar, call.replace("city", "town"))
    assert not accepts(grammar, call.replace("get_weather", "get_rain"))


def test_llama3_text_may_have_json_but_not_start_like_a_call() -> None:
    form = output_format(tool_parser="llama3", reasoning_parser=None)
    grammar = grammar_of(form.sampling_params(TOOLS))
    texts = ("", "{", '{"na', '{"a": 1}', '{"names": []}', 'Say {"name": "Ada"}.', '\n{"name": "Ada"}')
    assert [text for text in texts if not accepts(grammar, text)] == []
    assert not accepts(grammar, '{"name": "Ada"}')
    assert not accepts(grammar, '{"name": "get_rain", "parameters": {}}')


@pytest.mark.parametrize("name", ["hermes", "mistral", "llama3"])
def test_parallel_calls_can_be_switched_off(name: str) -> None:
    form = output_format(tool_parser=name, reasoning_parser=None)
    two = {"hermes": "\n", "mistral": "", "llama3": "; "}[name].join([CALLS[name]] * 2)
    for choice in ("auto", "required"):
        assert accepts(grammar_of(form.sampling_params(TOOLS, tool_choice=choice)), two)
        params = form.sampling_params(TOOLS, tool_choice=choice, parallel_tool_calls=False)
        assert accepts(grammar_of(params), CALLS[name])
        assert not accepts(grammar_of(params), two)


@pytest.mark.parametrize(
    ("reasoning", "name"), [("think", "hermes"), ("mistral_think", "mistral"), ("think", "mistral")]
)
def test_an_answer_may_begin_with_reasoning(reasoning: str, name: str) -> None:
    form = output_format(tool_parser=name, reasoning_parser=reasoning)
    begin, end = ("<think>", "</think>") if reasoning == "think" else ("[THINK]", "[/THINK]")
    for choice in ("auto", "required"):
        grammar = grammar_of(form.sampling_params(TOOLS, tool_choice=choice))
        assert accepts(grammar, f"{begin}I ask.{end}{CALLS[name]}")
        assert accepts(grammar, CALLS[name])
        assert accepts(grammar, f"{begin}I ask.{end}") == (choice == "auto")


def test_reasoning_that_the_prompt_opens_ends_before_the_constraint() -> None:
    form = output_format(tool_parser="hermes", reasoning_parser="think")
    params = form.sampling_params(TOOLS, tool_choice="required", prompt="<|im_start|>assistant\n<think>\n")
    assert params["reasoning_end"] == form.reasoning_end("<think>\n") == "</think>"
    assert accepts(grammar_of({"structural_tag": params["structural_tag"]}), TAGGED)
    closed = form.sampling_params(TOOLS, tool_choice="required", prompt="<think>\n\n</think>\n\n")
    assert "reasoning_end" not in closed
    assert not accepts(grammar_of(closed), f"<think></think>{TAGGED}")


def test_another_constraint_of_gpt_oss_starts_after_its_reasoning() -> None:
    form = output_format(tool_parser="gpt_oss")
    end = form.reasoning_end("<|start|>assistant")
    grammar = compiled(regex="[ab]+", reasoning_end=end)
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>"
    constraint = grammars().open(grammar, [], 0)
    for token_id in encoded(thought):
        assert constraint.thinking is not None
        constraint.advance(token_id)
    assert constraint.thinking is None
    assert parsed(form, f"{thought}ab") == [("reasoning", "Hm."), ("content", "ab")]
    assert "reasoning_end" not in form.sampling_params(TOOLS)


@pytest.mark.parametrize(
    ("name", "reasoning", "tools", "params"),
    [
        ("hermes", "think", TOOLS, {}),
        ("mistral", None, TOOLS, {"skip_special_tokens": False}),
        ("mistral", None, [], {}),
        ("mistral", "mistral_think", [], {"skip_special_tokens": False}),
        ("gpt_oss", None, [], {"skip_special_tokens": False}),
        (None, None, TOOLS, {}),
    ],
)
def test_without_calls_there_is_no_constraint(
    name: str | None, reasoning: str | None, tools: list[Any], params: dict[str, Any]
) -> None:
    form = output_format(tool_parser=name, reasoning_parser=reasoning)
    assert form.sampling_params(tools, tool_choice="none") == params
    assert tools or form.sampling_params(tools) == params


def test_wrong_choices_and_tools_are_refused() -> None:
    form = output_format(tool_parser="hermes", reasoning_parser=None)
    with pytest.raises(ValueError, match="tool_choice must be 'auto', 'none', 'required' or .*, got 'any'"):
        form.sampling_params(TOOLS, tool_choice="any")
    with pytest.raises(ValueError, match="tool_choice=.*get_rain.* needs a tool of the request; the tools are: "):
        form.sampling_params(TOOLS, tool_choice={"type": "function", "function": {"name": "get_rain"}})
    with pytest.raises(ValueError, match="'required' needs a tool of the request; the tools are: none"):
        form.sampling_params([], tool_choice="required")
    with pytest.raises(ValueError, match=r"tools\[1\] must have a function with a name"):
        form.sampling_params([TIME, {"type": "function", "function": {}}])
    for tool in ({"type": "function", "function": None}, "get_time", None):
        with pytest.raises(ValueError, match=r"tools\[0\] must have a function with a name"):
            form.sampling_params([tool])
    with pytest.raises(ValueError, match="tool_choice must be 'auto'"):
        form.sampling_params(TOOLS, tool_choice={"type": "function", "function": "get_time"})
    with pytest.raises(ValueError, match="the parameters of the tool 'f' must be the schema of an object"):
        form.sampling_params([{"name": "f", "parameters": {"type": "array"}}])
    with pytest.raises(ValueError, match="tool_choice='required' needs a tool parser"):
        output_format(tool_parser=None).sampling_params(TOOLS, tool_choice="required")


def test_a_schema_that_cannot_be_enforced_allows_any_object_unless_it_is_strict() -> None:
    form = output_format(tool_parser="hermes", reasoning_parser=None)
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"not": {}}}}}
    grammar = grammar_of(form.sampling_params([function], tool_choice="required"))
    assert accepts(grammar, '<tool_call>\n{"name": "f", "arguments": {"b": [1]}}\n</tool_call>')
    with pytest.raises(UnsupportedSchemaError, match="parameters of the tool 'f' cannot be enforced.*'not'") as raised:
        form.sampling_params([{"type": "function", "function": {**function, "strict": True}}])
    assert (raised.value.pointer, raised.value.keyword) == ("/properties/a", "not")


def test_tools_that_are_too_many_allow_any_object_unless_one_is_strict() -> None:
    form = output_format(tool_parser="hermes", reasoning_parser=None)
    properties = {f"p{i}": {"type": "string"} for i in range(30)}
    tools = [{"name": f"f{i}", "parameters": {"properties": properties}} for i in range(80)]
    grammar = grammar_of(form.sampling_params(tools, tool_choice="required"))
    assert accepts(grammar, '<tool_call>\n{"name": "f7", "arguments": {"p1": 5}}\n</tool_call>')
    with pytest.raises(ValueError, match="the tools cannot be enforced together: .*at most 2,048 subschemas"):
        form.sampling_params([*tools, {"name": "f", "strict": True}])


def test_descriptions_do_not_count_but_properties_of_their_name_do() -> None:
    form = output_format(tool_parser="hermes", reasoning_parser=None)
    texts = {"description": "x" * 10_000, "title": "y", "default": None}
    value = {"type": "array", "items": {"anyOf": [{"enum": [1], **texts}, {"$ref": "#/$defs/title"}]}, **texts}
    schema = {
        "properties": {"description": value},
        "required": ["description"],
        "$defs": {"title": {"const": "z", **texts}},
        "additionalProperties": False,
        **texts,
    }
    tools = [{"name": f"f{i}", "parameters": schema, "strict": True} for i in range(20)]
    params = form.sampling_params(tools, tool_choice="required")
    assert len(json.dumps(params)) < 20_000
    grammar = grammar_of(params)
    for value, is_valid in (('[1, "z"]', True), ('["y"]', False)):
        call = f'<tool_call>\n{{"name": "f3", "arguments": {{"description": {value}}}}}\n</tool_call>'
        assert accepts(grammar, call) == is_valid


def test_a_schema_of_any_depth_and_form_is_refused_by_the_name_of_its_tool() -> None:
    deep: Any = {}
    for _ in range(10_000):
        deep = {"items": deep}
    for parameters, match in ((deep, "are nested too deeply"), ({"properties": {"a": 5}}, "are not a JSON schema: ")):
        with pytest.raises(ValueError, match=f"the parameters of the tool 'f' {match}"):
            output_format(tool_parser="hermes").sampling_params([{"name": "f", "parameters": parameters}])


def test_tools_are_not_changed() -> None:
    tool = {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}
    output_format(tool_parser="hermes").sampling_params([tool])
    assert tool == {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}


def test_qwen3_coder_arguments_of_all_types_are_valid() -> None:
    schema = {
        "type": "object",
        "$defs": {"unit": {"enum": [1, 2]}},
        "properties": {
            "choice": {"type": "string", "enum": ["a", "b"]},
            "count": {"type": "integer"},
            "unit": {"$ref": "#/$defs/unit"},
            "list": {"type": "array", "items": {"type": "boolean"}},
            "name": {"type": ["string", "null"]},
        },
        "required": ["choice", "unit"],
    }
    tools = [{"name": "f", "parameters": schema}]
    form = output_format(tool_parser="qwen3_coder", reasoning_parser=None)
    grammar = grammar_of(form.sampling_params(tools, tool_choice="required", parallel_tool_calls=False))
    num_complete = 0
    for seed in range(12):
        text, is_complete = walk(grammar, seed)
        if is_complete:
            num_complete += 1
            ((_, _, arguments),) = parsed(form, text, tools=tools)
            jsonschema.validate(json.loads(arguments), schema)
    assert num_complete > 2

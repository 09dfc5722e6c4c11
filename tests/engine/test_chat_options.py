"""Chat options: templates, template variables, tools, and messages without content."""

from __future__ import annotations

from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from aioengine.api.args import engine_config
from aioengine.api.engine import AsyncEngine
from aioengine.frontend.intake.prompts import MAX_CHARACTERS
from aioengine.frontend.startup import blueprint_of
from aioengine.testing.fake_engine import fake_async_engine, fake_engine
from aioengine.tokenization.tokenizer import Tokenizer

pytestmark = pytest.mark.one_loop

MESSAGES = [{"role": "user", "content": "Hi"}]
TEMPLATE = """{% for message in messages %}<{{ message.role }}>{{ message.content }}
{%- for call in message.tool_calls %}{{ call.function.name }}{% endfor %}{% endfor %}
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- if add_generation_prompt %}<assistant>{% if enable_thinking is false %}!{% endif %}{% endif %}{{ mood }}"""
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
SHORT = {"max_new_tokens": 1}


class Unprintable:
    def __repr__(self) -> str:
        raise KeyError


class Mood(str, Enum):  # noqa: UP042  # not StrEnum: its str() is "Mood.NAME"
    NAME = "mood"
    CALM = "calm"


async def prompt_of(engine: AsyncEngine, messages: Any = MESSAGES, **options: Any) -> str:
    """Return the prompt that the model receives."""
    answer = await engine.async_chat(messages, SHORT, return_prompt_token_ids=True, **options)
    return engine.tokenizer.decode(answer["prompt_token_ids"], skip_special_tokens=False)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "<user>Hi<assistant>"),
        ({"enable_thinking": False}, "<user>Hi<assistant>!"),
        ({"enable_thinking": True}, "<user>Hi<assistant>"),
        ({"enable_thinking": None, "tools": None}, "<user>Hi<assistant>"),
        ({"chat_template_kwargs": {"mood": "calm", "enable_thinking": False}}, "<user>Hi<assistant>!calm"),
        ({"chat_template_kwargs": {Mood.NAME: Mood.CALM}}, "<user>Hi<assistant>calm"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "<user>Hi"),
        ({"chat_template_kwargs": {"continue_final_message": True}}, "<user>Hi"),
        (
            {"tools": TOOLS},
            '<user>Hi[{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]<assistant>',
        ),
    ],
)
async def test_options_reach_the_template(options: dict[str, Any], expected: str) -> None:
    async with fake_async_engine(allow_request_templates=True) as engine:
        assert await prompt_of(engine, chat_template=TEMPLATE, **options) == expected
        text = engine.tokenizer.apply_chat_template(MESSAGES, chat_template=TEMPLATE, **options)
        assert text == expected
        outs = await engine.async_chat(
            [MESSAGES] * 2, SHORT, return_prompt_token_ids=True, chat_template=TEMPLATE, **options
        )
        decode = partial(engine.tokenizer.decode, skip_special_tokens=False)
        assert [decode(out["prompt_token_ids"]) for out in outs] == [expected] * 2


async def test_messages_may_have_no_content() -> None:
    calls = [{"type": "function", "function": {"name": "add", "arguments": {}}}]
    async with fake_async_engine(allow_request_templates=True) as engine:
        messages = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": calls}]
        assert await prompt_of(engine, messages, chat_template=TEMPLATE) == "<user>Hi<assistant>add<assistant>"
        messages[-1] = {"role": "assistant", "content": None}
        assert await prompt_of(engine, messages, chat_template=TEMPLATE) == "<user>Hi<assistant><assistant>"
        for wrong in ({"role": "user", "content": None}, {"role": "assistant"}):
            with pytest.raises(ValueError, match=r"messages\[0\] has no content"):
                engine.async_chat([wrong])


async def test_large_tools_are_checked_off_the_loop() -> None:
    tools = [{"name": "x" * MAX_CHARACTERS}]
    async with fake_async_engine(context_length=600_000, num_pages=40_000, allow_request_templates=True) as engine:
        assert await prompt_of(engine, chat_template="{{ tools[0].name | length }}", tools=tools) == str(MAX_CHARACTERS)


async def test_template_file_is_read_when_it_is_used(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{{ messages[0].content }}!", encoding="utf-8")
    async with fake_async_engine(allow_request_templates=True) as engine:
        assert await prompt_of(engine, chat_template=file) == "Hi!"
        with pytest.raises(ValueError, match="cannot be read"):
            await prompt_of(engine, chat_template=tmp_path / "missing")
        with pytest.raises(ValueError, match=r"a file is given as a pathlib\.Path"):
            await prompt_of(engine, chat_template=str(file))  # the request may come from a client


@pytest.mark.parametrize("template", [TEMPLATE, Path("mine.jinja"), "no_such_name"])
async def test_a_request_cannot_bring_a_template_unless_the_engine_allows_it(template: str | Path) -> None:
    async with fake_async_engine() as engine:
        for messages in (MESSAGES, [MESSAGES] * 2):
            with pytest.raises(ValueError, match=r"^chat_template=.*\(default\).* allow_request_templates=True"):
                engine.async_chat(messages, SHORT, chat_template=template, return_exceptions=True)
        assert await prompt_of(engine, chat_template="default") == await prompt_of(engine)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"chat_template": 3}, TypeError, "chat_template must be the text"),
        ({"chat_template": "\ud800{{ 1 }}"}, ValueError, "chat_template must be text that UTF-8 can encode"),
        ({"chat_template_kwargs": "mood"}, TypeError, "chat_template_kwargs must be a dict"),
        ({"chat_template_kwargs": {"messages": []}}, ValueError, "chat_template_kwargs has 'messages'"),
        ({"chat_template_kwargs": {"tools": []}}, ValueError, "chat_template_kwargs has 'tools'"),
        ({"chat_template_kwargs": {5: 1}}, TypeError, "chat_template_kwargs keys must be a string, got 5"),
        ({"chat_template_kwargs": {"x" * 300: 1}}, ValueError, "chat_template_kwargs keys must be at most 256 bytes"),
        ({"chat_template_kwargs": {"\ud800": 1}}, ValueError, "chat_template_kwargs keys must be text that UTF-8"),
        ({"chat_template_kwargs": {Unprintable(): 1}}, TypeError, "chat_template_kwargs keys must be .* repr raises"),
        ({"enable_thinking": "no"}, TypeError, "enable_thinking must be True or False"),
        ({"chat_template_kwargs": {"enable_thinking": "no"}}, TypeError, "enable_thinking must be True or False"),
        ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": True}}, ValueError, "given twice"),
        ({"tools": {"name": "add"}}, TypeError, "tools must be a list of dicts in JSON schema form"),
        ({"tools": [print]}, TypeError, r"tools\[0\] must be a dict in JSON schema form"),
        ({"tools": [{}] * 1025}, ValueError, "tools must have at most 1024 entries"),
        ({"tool": []}, TypeError, "did you mean 'tools'"),
    ],
)
async def test_wrong_options_are_refused_at_the_call(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    async with fake_async_engine() as engine:
        with pytest.raises(error, match=message):
            engine.async_chat(MESSAGES, SHORT, **options)
        with pytest.raises(TypeError, match="chat takes it|unexpected argument"):
            engine.async_generate("a", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chat_template": "{% if %}"}, r"not valid \(line 1\)"),
        ({"chat_template": "no_such_name"}, "neither the text of a template"),
        ({"chat_template": "{{ raise_exception('no') }}"}, "refused the messages: no"),
        ({"tools": [{"name": object()}]}, "tools must be made of dicts, lists, text"),
        ({"chat_template_kwargs": {"mood": object()}}, "^the chat template variable 'mood' must be made of dicts"),
        ({"chat_template_kwargs": {"mood": Unprintable()}}, "^the chat template variable 'mood' must .* repr raises"),
        ({"chat_template_kwargs": {"add_generation_prompt": 1}}, "^add_generation_prompt must be True or False"),
    ],
)
async def test_wrong_templates_are_refused_at_the_await(options: dict[str, Any], message: str) -> None:
    async with fake_async_engine(allow_request_templates=True) as engine:
        with pytest.raises(ValueError, match=message):
            await engine.async_chat(MESSAGES, SHORT, **options)
        outs = await engine.async_chat([MESSAGES], SHORT, return_exceptions=True, **options)
        assert isinstance(outs[0], ValueError)


def test_synchronous_engine_accepts_the_same_options() -> None:
    with fake_engine(allow_request_templates=True) as engine:
        answer = engine.chat(
            MESSAGES, SHORT, chat_template=TEMPLATE, enable_thinking=False, return_prompt_token_ids=True
        )
        ids = engine.tokenizer.encode("<user>Hi<assistant>!", add_special_tokens=False)
        assert answer["prompt_token_ids"] == ids


def tokenizer_of(**arguments: object) -> Tokenizer:
    load = blueprint_of(engine_config(None, arguments)).load_tokenizer
    assert load is not None
    return load()


@pytest.mark.parametrize("is_allowed", [True, False])
def test_the_constructor_decides_whether_requests_may_bring_templates(is_allowed: bool) -> None:
    blueprint = blueprint_of(engine_config(None, {"allow_request_templates": is_allowed}))
    assert blueprint.settings.text.allow_request_templates == is_allowed


@pytest.mark.parametrize("kind", ["text", "path", "string path"])
def test_the_constructor_takes_a_template_or_its_file(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text(TEMPLATE, encoding="utf-8")
    given = {"text": TEMPLATE, "path": file, "string path": str(file)}[kind]
    tokenizer = tokenizer_of(chat_template=given)
    assert tokenizer.apply_chat_template(MESSAGES) == "<user>Hi<assistant>"
    assert tokenizer.apply_chat_template(MESSAGES, chat_template="{{ 1 }}") == "1"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"chat_template": 3}, TypeError, "chat_template must be a string"),
        ({"chat_template": ""}, ValueError, "chat_template is empty; give the text of a template, or the path"),
        ({"chat_template": "no/such/file.jinja"}, ValueError, "chat_template='no/such/file.jinja' cannot be read"),
        ({"chat_template": "{% if %}"}, ValueError, "the chat template is not valid"),
        ({"chat_template": "{{ 1 }}", "skip_tokenizer_init": True}, ValueError, "chat_template needs a tokenizer"),
    ],
)
def test_invalid_template_is_refused_before_the_model_is_loaded(
    arguments: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        tokenizer_of(**arguments)

"""Ids, text and chats match AutoTokenizer of transformers for all kinds of tokenizer folders."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from transformers import AutoTokenizer

from aioengine.tokenization.tokenizer import Tokenizer
from tests.unit.text.sample_tokenizers import ALL_SAMPLES, LLAMA, TEXTS, Sample, byte_fallback, byte_level

if TYPE_CHECKING:
    from pathlib import Path

TEMPLATE = """{{- bos_token }}{%- if tools %}{{ tools | tojson(indent=1) }}{% endif %}
{% for message in messages %}
    {% if message.role == 'assistant' %}
{% generation %}[assistant] {{ message.content }}{{ eos_token }}{% endgeneration %}
    {% else %}
[{{ message.role }}] {{ message['content'] | trim }}{{ eos_token }}
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}[assistant]{% endif %}"""
MESSAGES = [
    {"role": "user", "content": " What is 1 < 2? é🙂 "},
    {"role": "assistant", "content": "True."},
    {"role": "user", "content": "Sure"},
]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "é <b>", "parameters": {"type": "object"}}}]


def load_both(folder: Path, sample: Sample, config: dict[str, Any], **sections: Any) -> tuple[Tokenizer, Any]:
    (folder / "tokenizer.json").write_text(json.dumps({**sample.file, **sections}))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer(folder), AutoTokenizer.from_pretrained(folder)


def adds(token: str, token_id: int) -> dict[str, Any]:
    piece, text = {"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    known = {token: {"id": token, "ids": [token_id], "tokens": [token]}}
    return {"type": "TemplateProcessing", "single": [piece, text], "pair": [text, text], "special_tokens": known}


FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
LLAMA_CONFIG = {**FAST, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": TEMPLATE}
END = {"content": "</s>", "special": False, "normalized": True}
BOS = {"post_processor": adds("<s>", 1)}
LLAMA_SAMPLE = byte_fallback("llama", LLAMA, prepends=True)
CASES: list[Any] = [pytest.param(sample, FAST, {}, id=sample.name) for sample in ALL_SAMPLES]
CASES += [
    pytest.param(LLAMA_SAMPLE, LLAMA_CONFIG, {}, id="no post-processor"),
    pytest.param(LLAMA_SAMPLE, LLAMA_CONFIG, BOS, id="post-processor adds"),
    pytest.param(LLAMA_SAMPLE, {**LLAMA_CONFIG, "add_bos_token": False}, BOS, id="config says no"),
    pytest.param(
        LLAMA_SAMPLE, {**LLAMA_CONFIG, "add_bos_token": True, "add_eos_token": True}, {}, id="config says yes"
    ),
    pytest.param(
        LLAMA_SAMPLE,
        {**LLAMA_CONFIG, "added_tokens_decoder": {"328": {"content": "<|end|>", "special": False}, "2": END}},
        {},
        id="described in the config",
    ),
    pytest.param(
        byte_level(),
        {**FAST, "eos_token": "<|end|>", "pad_token": "<|pad|>", "additional_special_tokens": ["<|tool|>", "<|x|>"]},
        {},
        id="tokens of the config",
    ),
]


@pytest.mark.parametrize(("sample", "config", "sections"), CASES)
def test_ids_and_text(sample: Sample, config: dict[str, Any], sections: dict[str, Any], tmp_path: Path) -> None:
    ours, theirs = load_both(tmp_path, sample, config, **sections)
    texts = [*TEXTS, "a<|pad|> b<|x|>c</s>"]
    for text in texts:
        expected = theirs.encode(text)
        assert ours.encode(text) == expected
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
        for skip in (True, False):
            options = {"skip_special_tokens": skip, "clean_up_tokenization_spaces": False}
            assert ours.decode(expected, skip_special_tokens=skip) == theirs.decode(expected, **options)
    assert ours.encode_batch(texts) == [theirs.encode(text) for text in texts]
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.vocab_size == len(theirs)


@pytest.mark.parametrize("options", [{}, {"tools": TOOLS}, {"continue_final_message": True}])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chats(options: dict[str, Any], add_generation_prompt: bool, tmp_path: Path) -> None:
    ours, theirs = load_both(tmp_path, LLAMA_SAMPLE, LLAMA_CONFIG, **BOS)
    if options.get("continue_final_message"):
        add_generation_prompt = False  # transformers refuses both at once
    options = {**options, "add_generation_prompt": add_generation_prompt}
    assert ours.apply_chat_template(MESSAGES, **options) == theirs.apply_chat_template(
        MESSAGES, tokenize=False, **options
    )
    ids = theirs.apply_chat_template(MESSAGES, tokenize=True, return_dict=False, **options)
    assert ours.apply_chat_template(MESSAGES, tokenize=True, **options) == ids


THINKING = """{% for message in messages %}<{{ message.role }}>
{%- if message.reasoning_content %}({{ message.reasoning_content }}){% endif %}
{%- if message.thinking %}[{{ message.thinking }}]{% endif %}
{%- if message.content is defined %}{{ message.content }}{% else %}nothing{% endif %}
{%- for call in message.tool_calls %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}
{%- endfor %}{{ tools | tojson }}{{ documents }}
{%- if add_generation_prompt %}<assistant>{% if enable_thinking is defined and not enable_thinking %}</think>{% endif %}
{%- endif %}{{ effort }}"""
CALLS = [{"type": "function", "id": "1", "function": {"name": "add", "arguments": {"a": 1, "b": [2.5, None, True]}}}]
WITH_CALLS = [
    {"role": "user", "content": "1 + 2?", "name": None},
    {"role": "assistant", "content": None, "tool_calls": CALLS},
    {"role": "tool", "content": "3", "tool_call_id": "1"},
    {"role": "assistant", "content": None, "tool_calls": None, "reasoning": "hm"},
    {"role": "assistant", "content": "It is 3.", "thinking": "so"},
]


@pytest.mark.parametrize("messages", [MESSAGES, WITH_CALLS])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enable_thinking": False},
        {"enable_thinking": True, "effort": "high", "documents": [{"title": "a", "text": "b"}]},
        {"tools": TOOLS, "effort": {"low": [1, 2]}},
        {"tools": []},
        {"chat_template": "{{ messages | length }}{{ bos_token }}{{ effort }}", "effort": 3},
    ],
)
def test_chats_with_variables_and_tools(messages: Any, options: dict[str, Any], tmp_path: Path) -> None:
    ours, theirs = load_both(tmp_path, LLAMA_SAMPLE, {**LLAMA_CONFIG, "chat_template": THINKING})
    expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
    assert ours.apply_chat_template(messages, **options) == expected
    variables = {name: value for name, value in options.items() if name not in ("tools", "chat_template")}
    others = {name: value for name, value in options.items() if name not in variables}
    assert ours.apply_chat_template(messages, chat_template_kwargs=variables, **others) == expected


EXPRESSIONS = [
    "{{ 2 ** 10 }} {{ 7 // 2 }} {{ 'a' * 3 }} {{ [1] + [2] }} {{ '%s is %d' % ('a', 3) }} {{ '{b:>4}'.format(b=2) }}",
    "{{ messages|join('+', attribute='role') }} {{ [[1], [2]]|sum(start=[]) }} {{ [1, 2, 3]|batch(2)|list }}",
    "{{ 'a\nb'|indent }} {{ 'ab'|center(6) }} {{ 'aab'|replace('a', 'x', 1) }} {{ '  a,b '.strip().split(',') }}",
    "{{ {'b': '<é>', 'a': [1]}|tojson }} {{ [1]|tojson(indent=1) }} {{ {'b': 1, 'a': 2}|tojson(sort_keys=true) }}",
    "{{ 'é'|tojson(true) }} {{ [1, 2]|tojson(separators=(',', ':')) }} {{ dict(a=1) }} {{ dict.fromkeys([1]) }}",
    "{% for a, b in {'x': 1}.items() %}{{ loop.length }}{{ a }}{{ b }}{% endfor %}{{ 'abc'[::-1] }}",
    "{% set n = namespace(self=1, a=[]) %}{% for i in range(3) %}{% set n.a = n.a + [i] %}{% endfor %}{{ n.a, n }}",
    "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% elif i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}",
    "{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(1) ~ f('a') }}{% set t %}b{{ f(2) }}{% endset %}{{ t|upper }}",
    "{% generation %}{% set inner = 1 %}said{% endgeneration %}{{ inner is defined }}",
    "{{ (messages|groupby('role')|first).grouper }} {{ messages|map(attribute='role')|select('in', ['user'])|list }}",
    "{{ strftime_now('%Y') }} {{ cycler('a', 'b').next() }} {% autoescape true %}{{ '<' ~ '>' }}{% endautoescape %}",
]


@pytest.mark.parametrize("template", EXPRESSIONS)
def test_templates_are_rendered_as_by_transformers(template: str, tmp_path: Path) -> None:
    ours, theirs = load_both(tmp_path, LLAMA_SAMPLE, {**LLAMA_CONFIG, "chat_template": template})
    expected = theirs.apply_chat_template(MESSAGES, tokenize=False)
    assert ours.apply_chat_template(MESSAGES, add_generation_prompt=False) == expected


REFUSED = [
    "{{ raise_exception('no') }}",
    "{{ messages.append(1) }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ dict.__mro__[1] }}",
    "{{ dict.mro()[1] }}",
    "{% set n = namespace() %}{% set n.__call__ = raise_exception %}",
    "{{ namespace(jinja_pass_arg=1, __call__=raise_exception) }}",
    "{{ range(1000000)|list }}",
]


@pytest.mark.parametrize("template", REFUSED)
def test_templates_are_refused_as_by_transformers(template: str, tmp_path: Path) -> None:
    ours, theirs = load_both(tmp_path, LLAMA_SAMPLE, {**LLAMA_CONFIG, "chat_template": template})
    with pytest.raises(Exception):  # noqa: B017, PT011  # jinja2's errors, and OverflowError
        theirs.apply_chat_template(MESSAGES, tokenize=False)
    with pytest.raises(ValueError, match="the chat template refused the messages"):
        ours.apply_chat_template(MESSAGES)


def test_chat_template_argument_replaces_the_templates_of_the_folder(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    _, theirs = load_both(tmp_path, LLAMA_SAMPLE, {**LLAMA_CONFIG, "chat_template": named})
    theirs.chat_template = THINKING
    ours = Tokenizer(tmp_path, chat_template=THINKING)
    for options in ({}, {"tools": TOOLS}):
        expected = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True, **options)
        assert ours.apply_chat_template(MESSAGES, **options) == expected

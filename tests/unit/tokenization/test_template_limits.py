"""Templates are code of strangers: whatever one does, it ends soon, in little memory, with an error of its own."""

from __future__ import annotations

import asyncio
import os
import time
import tracemalloc
from collections.abc import Mapping, Sequence

import pytest

from aioengine import checks
from aioengine.frontend.encoder import Encoded, Encoder, Job
from aioengine.frontend.prompts import ChatPrompt, TemplateOptions, TextPrompt
from aioengine.tokenization import template_limits
from aioengine.tokenization.chat_template import MAX_VALUES, ChatTemplates
from aioengine.tokenization.template_language import MAX_MESSAGE, Template
from aioengine.tokenization.template_limits import MAX_BUILT, MAX_SECONDS, MAX_SIZE

MESSAGES = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
GENEROUS_S = 20 * MAX_SECONDS
"""With the notes on memory that are taken at the same time."""
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}BODY{% endfor %}{% endfor %}x"
DOUBLED = "{% set n = namespace(x=START) %}{% for i in range(99) %}{% set n.x = NEXT %}{% endfor %}{{ n.x|length }}"


def doubled(start: str, following: str) -> str:
    return DOUBLED.replace("START", start).replace("NEXT", following)


ENDLESS = {
    "loops": LOOP.replace("BODY", ""),
    "loops with a condition": "{% for i in range(99999) %}{% for j in range(99999) if j < 0 %}{% endfor %}{% endfor %}",
    "loops that continue": LOOP.replace("BODY", "{% continue %}"),
    "a recursive loop": (
        "{% for i in [1, 1] recursive %}{% if loop.depth < 60 %}{{ loop([1, 1]) }}{% endif %}{% endfor %}"
    ),
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "filters": "{% for i in range(99999)|map('string')|select('in', 'x' * 999999) %}{{ i }}{% endfor %}",
}
LARGE = {
    "power": "{% set x=9**(9**8) %}a{{1}}",
    "power of a variable": "{% for i in [9] %}{{ i ** (i ** 8) }}{% endfor %}",
    "squares": doubled("3", "n.x * n.x"),
    "large integers": "{{ ('f' * 4000000)|int(base=16) // 3 }}",
    "wordcount": "{{ ('a '*20000000)|wordcount }}",
    "replace": "{{ ('ab'*50000000)|replace('a','bbb')|length }}",
    "replace by more": "{{ ('a' * 999999)|replace('a', 'b' * 999999)|length }}",
    "replace of nothing": "{{ ('a' * 999999).replace('', 'b' * 999999)|length }}",
    "punycode": "{{ ('a' * 300000 ~ '-' ~ 'a' * 300000).encode().decode('punycode')|length }}",
    "center": "{{ 'a'|center(999999999)|length }}",
    "the method center": "{{ 'a'.center(9999999999)|length }}",
    "zfill": "{{ 'a'.zfill(9999999999)|length }}",
    "to_bytes": "{{ (1).to_bytes(9999999999, 'big')|length }}",
    "tabs": "{{ ('\\t' * 99999).expandtabs(99999)|length }}",
    "translate": "{{ ('a' * 4000000).translate({97: 'b' * 1000})|length }}",
    "times": "{{ strftime_now('%99999999d' * 400000)|length }}",
    "indent": "{{ ('a\\n' * 99999)|indent(99999)|length }}",
    "indent by text": "{{ ('a\\n' * 99999)|indent('x' * 99999)|length }}",
    "format": "{{ '%9999999999d'|format(1) }}",
    "format of an operator": "{{ '%9999999999d' % 1 }}",
    "format of an argument": "{{ '%*d' % (999999999, 1) }}",
    "a method of format": "{{ '{:9999999999}'.format(1) }}",
    "a width from an argument": "{{ '{:{}}'.format(1, 999999999) }}",
    "format with many places": "{{ ('{0}' * 99999).format('x' * 99999) }}",
    "format of a namespace": "{% set n = namespace(x='x' * 99999) %}{{ ('{0.x}' * 99999).format(n) }}",
    "join": "{{ (['a'] * 99999)|join('x' * 99999) }}",
    "the method join": "{{ ('x' * 99999).join(['a'] * 99999) }}",
    "join of an attribute": "{% set n = namespace(x='x' * 99999) %}{{ ([n] * 9999)|join(attribute='x') }}",
    "join of a generator": "{{ ''.join(range(99999)|map('center', 9999)) }}",
    "batch": "{{ [1]|batch(999999999, 'x')|list|length }}",
    "slice": "{{ [1]|slice(999999999)|list|length }}",
    "round": "{{ 1.5|round(999999999, 'floor') }}",
    "tojson": "{{ [[[1]]]|tojson(indent=999999999) }}",
    "tojson by text": "{{ ([1] * 9999)|tojson(separators=('x' * 99999, ':')) }}",
    "sum of lists": "{{ ([[1] * 99] * 2000)|sum(start=[])|length }}",
    "striptags": "{{ ('<!---->' * 400000)|striptags }}",
    "wordwrap": "{{ ('a ' * 400000)|wordwrap(1) }}",
    "repetition": "{{ ('a' * 999999999)|length }}",
    "repetition of a list": "{{ (999999999 * [1])|length }}",
    "nested cyclers": doubled("{}", "cycler(n.x, n.x).items").replace("|length", "|string"),
    "a chain of generators": doubled("[1]", "[n.x]|batch(1)").replace("range(99)", "range(99999)"),
    "kept texts": "{% set n = namespace(x=()) %}{% for i in range(9999) %}{% set n.x = (n.x, '\U0001f600' * 1000000) %}"
    "{% endfor %}",
    "doubled text": doubled("'a'", "n.x + n.x"),
    "joined text": doubled("'a'", "n.x ~ n.x"),
    "captured text": doubled("'a'", "n.x").replace("{% set n.x = n.x %}", "{% set n.x %}{{n.x}}{{n.x}}{% endset %}"),
    "text of a macro": "{% macro f(n) %}{% for i in range(9999) %}{{ 'x' * 9999 }}{% endfor %}{% endmacro %}{{ f(1) }}",
    "lists of a generator": "{{ ([range(99999)] * 40)|map('list')|map('sort')|map('list')|list|length }}",
    "copies": "{% set n = namespace() %}{% set x = ['a'] * 9999 %}" + LOOP.replace("BODY", "{% set n.x = x[:] %}"),
    "output": "{% set x = 'x' * 999999 %}{% for i in range(99999) %}{{ x }}{% endfor %}",
    "output of lists": "{% set x = ['x' * 9999] * 99 %}{% for i in range(99999) %}{{ x }}{% endfor %}",
    "endless recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "search from the end": "{{ ('a' * 2000000).rfind('ab' ~ 'a' * 1000000) }}",
    "strip": "{{ ('a' * 2000000).strip('b' * 1000000 ~ 'a')|length }}",
    "trim": "{{ ('a' * 2000000)|trim('b' * 1000000 ~ 'a')|length }}",
    "deep nesting": "{{ " + "(" * 9999 + ")" * 9999 + " }}",
    "digits": "{{ 1" + "0" * 99999 + " }}",
}
NESTED = {
    "doubled lists": doubled("[1]", "n.x + n.x"),
    "nested lists": doubled("[1]", "[n.x, n.x]"),
    "nested tuples": doubled("(1,)", "(n.x, n.x)"),
    "nested dicts": doubled("{}", "{1: n.x, 2: n.x}"),
    "nested calls": doubled("{}", "dict(a=n.x, b=n.x)"),
    "nested views": doubled("{}", "dict(a=n.x, b=n.x).values()").replace("|length", ""),
    "nested items": doubled("{}", "dict(a=n.x, b=n.x).items()").replace("|length", ""),
    "nested arguments": (
        "{% set n = namespace(x=[1]) %}{% macro f() %}{% set n.x = varargs %}{% endmacro %}"
        "{% for i in range(40) %}{{ f(n.x, n.x) }}{% endfor %}{{ n.x }}"
    ),
    "nested named arguments": (
        "{% set n = namespace(x=[1]) %}{% macro f() %}{% set n.x = kwargs %}{% endmacro %}"
        "{% for i in range(40) %}{{ f(a=n.x, b=n.x) }}{% endfor %}{{ n.x }}"
    ),
}
LONG = {
    "constants": "{{ 'a'|center(9999) }}" * 9999,
    "macros": "".join(f"{{% macro a{i}() %}}x{{% endmacro %}}" for i in range(8000)),
    "conditions": "{% if a %}{{ b }}{% endif %}" * 30_000,
}


def refused(source: str) -> str:
    """The message of the ValueError that a template ends with, within its time and little memory."""
    tracemalloc.start()
    begun_at = time.thread_time()
    try:
        with pytest.raises(ValueError, match="chat template") as error:
            Template(source).render({"messages": MESSAGES})
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert time.thread_time() - begun_at < GENEROUS_S
    assert peak < 40 * MAX_SIZE
    return str(error.value)


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_a_template_that_runs_for_long_is_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 0.1)
    assert "CPU time" in refused(source)


@pytest.mark.parametrize("source", LARGE.values(), ids=LARGE)
def test_a_template_that_builds_large_values_is_stopped(source: str) -> None:
    refused(source)


@pytest.mark.parametrize("source", NESTED.values(), ids=NESTED)
def test_a_template_that_nests_values_is_stopped_by_their_size(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With smaller limits, which are reached before the CPU time is used up: the notes on memory slow this down."""
    monkeypatch.setattr(template_limits, "MAX_SIZE", MAX_SIZE // 64)
    monkeypatch.setattr(template_limits, "MAX_BUILT", MAX_BUILT // 64)
    assert "characters" in refused(source)


@pytest.mark.parametrize("source", LONG.values(), ids=LONG)
def test_large_templates_are_compiled_within_the_time(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 0.1)
    assert "CPU time" in refused(source)


def test_messages_of_errors_are_short() -> None:
    for source in ("{{ raise_exception('x' * 99999) }}", "{{ 1|" + "x" * 99999 + " }}"):
        assert len(refused(source)) < MAX_MESSAGE + 200


def test_rendered_text_with_a_lone_surrogate_is_refused() -> None:
    assert "position 1 is a lone surrogate" in refused("a{{ '\\ud800' }}")


def test_large_chats_can_be_rendered() -> None:
    content = "a word " * 500_000
    source = "{% for m in messages %}{{ '<' + m.role ~ '>' + m['content']|trim + '%s' % m.content }}{% endfor %}"
    written = Template(source).render({"messages": [{"role": "user", "content": content}] * 3})
    assert written == f"<user>{content.strip()}{content}" * 3


def test_templates_may_index_the_messages_of_a_long_chat_in_a_loop() -> None:
    source = "{% for m in messages %}{{ messages[loop.index0:]|length }} {{ (messages + [m])|length }} {% endfor %}"
    written = Template(source).render({"messages": MESSAGES * 100})
    assert written.split()[-2:] == ["1", "201"]


@pytest.mark.parametrize(
    ("source", "written"),
    [
        (
            "{{ 2 ** 10 }} {{ 7 // 2 }} {{ 7 % 4 }} {{ 'a' * 3 }} {{ [1] + [2] }} {{ 1.5 + 1 }}",
            "1024 3 3 aaa [1, 2] 2.5",
        ),
        ("{{ '%s is %d' % ('a', 3) }} {{ '{} {b:>4}'.format(1, b=2) }} {{ '100% of %%'[0:4] }}", "a is 3 1    2 100%"),
        (
            "{{ [1, 2]|join(', ') }} {{ messages|join('+', attribute='role') }} {{ '-'.join(['a', 'b'])}}",
            "1, 2 user+assistant a-b",
        ),
        ("{{ [1, 2]|sum }} {{ [[1], [2]]|sum(start=[]) }} {{ [1, 2, 3]|batch(2)|list }}", "3 [1, 2] [[1, 2], [3]]"),
        ("{{ 'a\nb'|indent }} {{ 'ab'|center(6) }}|{{ 'aab'|replace('a', 'x', 1) }}", "a\n    b   ab  |xab"),
        ("{{ {'a': [1]}|tojson }} {{ [1]|tojson(indent=1) }} {{ 'é'|tojson }}", '{"a": [1]} [\n 1\n] "é"'),
        ("{% for a, b in {'x': 1}.items() %}{{ loop.length }}{{ a }}{{ b }}{% endfor %}", "1x1"),
        (
            "{{ '  a,b '.strip().split(',') }} {{ (1, 'a')[0] }} {{ 'abc'[::-1] }} {{ 'a' ~ 1 ~ [2] }}",
            "['a', 'b'] 1 cba a1[2]",
        ),
        (
            "{% set n = namespace(a=[]) %}{% for i in range(3) %}{% set n.a = n.a + [i] %}{% endfor %}{{ n.a }}",
            "[0, 1, 2]",
        ),
        ("{{ ' a '|trim }}{{ 'xax'|trim('x') }}{{ 'a b c'.rsplit(' ', 1) }}{{ 'xa'.strip('x') }}", "aa['a b', 'c']a"),
        ("{% autoescape true %}{{ '<' ~ '>' }}{% endautoescape %}", "&lt;&gt;"),
        ("{{ messages|map(attribute='role')|select('in', ['user'])|list }}", "['user']"),
        ("{% if []|select %}an iterator{% endif %}{{ (messages|map(attribute='role'))[0] }}", "an iterator"),
        (
            "{{ 'a'.ljust(3) }}|{{ {'a': 1}.values()|list }}{{ (messages|groupby('role')|first).grouper }}",
            "a  |[1]assistant",
        ),
    ],
)
def test_limits_do_not_change_what_templates_render(source: str, written: str) -> None:
    assert Template(source).render({"messages": MESSAGES}) == written


def test_values_that_share_nested_lists_are_not_copied_exponentially() -> None:
    shared: list[object] = [1]
    for _ in range(60):
        shared = [shared, shared]
    for messages, variables in (([{"role": "user", "content": shared}], {}), (MESSAGES, {"x": shared})):
        with pytest.raises(ValueError, match=f"has more than {MAX_VALUES} values"):
            ChatTemplates({"default": "{{ messages }}"}, {}).render(
                messages,
                add_generation_prompt=False,
                tools=None,
                chat_template=None,
                continue_final_message=False,
                variables=variables,
            )
    assert len(checks.shown(shared)) < 100


def accept(token_ids: list[int]) -> None:
    """All ids are right."""


class Characters:
    """A tokenizer whose ids are the characters of a text."""

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        return [[ord(character) for character in text] for text in texts]

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: object = None,
        chat_template: str | os.PathLike[str] | None = None,
        chat_template_kwargs: object = None,
    ) -> str:
        return Template(str(chat_template)).render({"messages": messages})


@pytest.mark.parametrize(
    "source", [ENDLESS["loops"], LARGE["power"], "a{{ '\\ud800' }}", "{{ raise_exception('no') }}"]
)
async def test_a_chat_whose_template_is_stopped_fails_alone(source: str) -> None:
    found: list[list[Encoded]] = []
    encoder = Encoder(Characters())
    chat = ChatPrompt(MESSAGES, 1, TemplateOptions(template=source))
    for prompt in (chat, TextPrompt("text", 4)):
        encoder.encode(Job([prompt], lambda encoded, _seconds: found.append(encoded), accept))
    async with asyncio.timeout(60):
        while len(found) < 2:  # noqa: ASYNC110  # jobs have no event
            await asyncio.sleep(0.01)
    [refused], [ids] = found
    assert isinstance(refused, ValueError)
    assert ids == [ord(character) for character in "text"]
    encoder.close()

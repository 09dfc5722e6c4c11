"""Chat templates: sizes, and errors of a template that is not valid or fails."""

from __future__ import annotations

import pytest

from aioengine.tokenization import template_language
from aioengine.tokenization.chat_template import MAX_TEMPLATE_BYTES, compiled

MESSAGES: list[dict[str, object]] = [{"role": "user", "content": "Hello"}]


def rendered(source: str, messages: list[dict[str, object]] = MESSAGES) -> str:
    return compiled(source).render({"messages": messages})


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% if %}", r"the chat template is not valid \(line 1\)"),
        ("{{ " + "(" * 9999 + ")" * 9999 + " }}", "the chat template cannot be compiled: (Recursion|Memory)Error"),
        ("{{ 1" + "0" * 99999 + " }}", "the chat template cannot be compiled: ValueError"),
        (" " * (MAX_TEMPLATE_BYTES + 1), "the chat template must be at most 131072 bytes"),
        ("{{ 1|" + "x" * 99999 + " }}", "the chat template is not valid"),
    ],
)
def test_invalid_templates_are_refused(source: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        compiled(source)
    assert len(str(caught.value)) < 1200


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('x' * 99999) }}", "the chat template refused the messages: xxx"),
        ("{{ 1 / 0 }}", "the chat template refused the messages: division by zero"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "the chat template refused the messages: .*recursion"),
        ("a{{ '\\ud800' }}", "position 1 is a lone surrogate"),
    ],
)
def test_errors_of_templates_are_value_errors(source: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        rendered(source)
    assert len(str(caught.value)) < 1200


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}text{% endfor %}{% endfor %}",
        "{% macro f() %}{% for i in range(99999) %}text{% endfor %}{% endmacro %}{{ f() | length }}",
    ],
)
def test_output_of_a_template_is_bounded(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_language, "MAX_TEXT", 1000)
    with pytest.raises(ValueError, match="it writes more than 1000 characters"):
        rendered(source)


def test_large_chats_can_be_rendered() -> None:
    content = "a word " * 500_000
    source = "{% for m in messages %}{{ '<' + m.role ~ '>' + m['content']|trim + '%s' % m.content }}{% endfor %}"
    messages: list[dict[str, object]] = [{"role": "user", "content": content}] * 3
    assert rendered(source, messages) == f"<user>{content.strip()}{content}" * 3

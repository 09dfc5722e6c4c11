"""Regular expressions of Python as grammars: they match the same complete texts, or fewer."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioengine.constraints.python_regex import translate
from aioengine.errors import UnsupportedSchemaError
from aioengine.protocol.messages import Grammar
from tests.kit.grammar_walks import accepts, text_of, walk

PATTERNS = [
    r"[a-f]+",
    r"^\d{2,4}-\w+$",
    r"(?:yes|no)(?: maybe)?",
    r"a|bc*|^d$",
    r"(?i)he[l-n]lo\W",
    r"[^\d\s]{1,3}\s\D",
    r"(?x) a b  # comment",
    r"(?s:.)\n?.",
    r"\S+@\S+\.(?P<top>com|org)",
    r"é+[à-ü]\u00df\t",
    r"[\w.-]{3}[]^\\-]",
    r"x*?y+?z??",
    r"(a(b(c)?)?)*",
    r"(?a)\w\d\s",
    r"[^a-z]{2}",
    r"\AB\Z",
    r"",
    r"/[/]\/",
]


def regex(pattern: str) -> Grammar:
    return Grammar("regex", translate(pattern, pointer=""), eos_token_ids=(0,))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_generated_texts_match_the_whole_pattern(pattern: str) -> None:
    grammar = regex(pattern)
    for seed in range(6):
        ids, is_complete = walk(grammar, seed, max_tokens=40)
        if is_complete:
            assert re.fullmatch(pattern, text_of(ids)) is not None


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        (r"\w+", ["café", "a b", "東京", "x_1", ""]),
        (r"\d+", ["12", "٣", "a"]),
        (r"(?a)\w+", ["abc", "é"]),
        (r"a.c", ["abc", "a\nc", "aéc"]),
        (r"^a|^b$", ["a", "b", "ab"]),
        (r"(?:^(?:a|b)|c$)", ["a", "b", "c", "bc"]),
        (r"(?i)ab", ["aB", "AB", "ac"]),
        (r"\s", [" ", "\x1c", "\u2003", "x"]),
        (r"a{2,3}", ["a", "aa", "aaa", "aaaa"]),
    ],
)
def test_translated_patterns_match_like_python(pattern: str, texts: list[str]) -> None:
    assert [accepts(regex(pattern), text) for text in texts] == [
        re.fullmatch(pattern, text) is not None for text in texts
    ]


LETTERS = "aKks\u017f\u212aéÉςσΣµμ\u039cİı1\u0666_ \x85\x1c\u2003Ľ-"


@pytest.mark.parametrize(
    "flags", ["(?a)%s", "(?ia)%s", "(?a:%s)", "(?i)(?a:%s)", "(?a)(?u:%s)", "(?a:(?u:%s))", "(?ia)(?-i:%s)"]
)
@pytest.mark.parametrize(
    "part", [r"\w", r"\d", r"\s", r"[^\w]", r"[\w-]", "é", "[é]", "ς", "\u017f", "µ", "k", "[a-z]"]
)
def test_flags_of_groups_have_the_meaning_of_python(flags: str, part: str) -> None:
    pattern = flags % part
    grammar = regex(pattern)
    for char in LETTERS:
        assert not accepts(grammar, char) or re.fullmatch(pattern, char)
    is_plain = part in (r"\w", r"\d", "k", "[a-z]") and "i" not in flags
    assert not is_plain or all(accepts(grammar, char) == bool(re.fullmatch(pattern, char)) for char in LETTERS)


_atoms = st.sampled_from(["a", "b", "[ab]", "[^a]", r"\d", ".", "é", r"\.", r"\w"])


@st.composite
def patterns(draw: st.DrawFn) -> str:
    return draw(
        st.recursive(
            _atoms,
            lambda inner: st.one_of(
                st.tuples(inner, inner).map("".join),
                st.tuples(inner, inner).map("(?:{0[0]}|{0[1]})".format),
                st.tuples(inner, st.sampled_from(["*", "+", "?", "{1,2}", "{2}"])).map("(?:{0[0]}){0[1]}".format),
            ),
            max_leaves=6,
        )
    )


@settings(deadline=None, max_examples=60)
@given(patterns(), st.integers(0, 1000))
def test_outputs_of_any_pattern_match_it(pattern: str, seed: int) -> None:
    ids, is_complete = walk(regex(pattern), seed, max_tokens=30)
    if is_complete:
        assert re.fullmatch(pattern, text_of(ids)) is not None


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        (r"(?=a)b", "lookaround"),
        (r"(?<!a)b", "lookaround"),
        (r"(a)\1", "a reference to a group"),
        (r"(a)?(?(1)b|c)", "a reference to a group"),
        (r"a\bb", "an anchor or a word boundary"),
        (r"a$b", "an anchor"),
        (r"(?>a+)b", "an atomic group"),
        (r"a++b", "possessive"),
        (r"((a{1000}){1000})", "counted repetitions"),
        ("a" * 20_000, "bytes"),
        ("(" * 3000 + ")" * 3000, "nested too deeply"),
        (r"(?i)[à-ü]", "ignores case"),
    ],
)
def test_parts_that_cannot_be_translated_are_refused(pattern: str, why: str) -> None:
    with pytest.raises(ValueError, match=why if "nested" not in why else "nested|recursion") as caught:
        translate(pattern, pointer="/properties/a/pattern")
    if isinstance(caught.value, UnsupportedSchemaError):
        assert (caught.value.pointer, caught.value.keyword) == ("/properties/a/pattern", "regex")


def test_a_searched_pattern_may_match_anywhere_and_is_ascii() -> None:
    assert translate("a", pointer="", is_searched=True) == "(?s:.*)a(?s:.*)"
    assert translate("^a$", pointer="", is_searched=True) == "a"
    assert translate(r"^\d", pointer="", is_searched=True) == "[0-9](?s:.*)"

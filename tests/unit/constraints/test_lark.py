"""Checks of grammars in GBNF and Lark's syntax before the library compiles them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance.gbnf_to_lark import any_to_lark

from aioengine.constraints.lark import checked_lark, lark_names, with_short_escapes
from tests.kit.grammar_walks import accepts, allowed, demo_grammars, grammar_of, token_bytes, walk


@pytest.mark.parametrize(
    "text",
    [
        "start: T\nT: /(x{7})*/ & /(x{11})*/",
        'start: "a"\nT: ~/.*c.*/',
        'start: /a\n"/ & /b"/',
        'start: <"> & "b"',
        'start: "\\" & " & "b"',
        'start: %json {"const": "}"} & "b"',
    ],
)
def test_operators_of_terminals_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="of terminals is not supported"):
        checked_lark(text, {})


@pytest.mark.parametrize(
    "text",
    [
        'start: "&~" // & ~\n | /[^&]~/ # &',
        'start: "a" ~ 3..5 | "b"~2 | "c"{4}',
        'start: <|a&b|>\nr[stop="&"]: /.*/',
        'start: T\nT: %regex {"substring_words": "a & ~ b"}',
        'start: %json {"enum": ["&", "~"]}',
    ],
)
def test_characters_of_operators_are_allowed_elsewhere(text: str) -> None:
    checked_lark(text, {})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('start: T0\n' + "".join(f'T{i}: T{i + 1} | "{i}"\n' for i in range(1500)), "at most 1,000"),
        ("root ::= r0\n" + "".join(f'r{i} ::= r{i + 1}\n' for i in range(1500)) + 'r1500 ::= "a"', "at most 1,000"),
        ('start: %json {"type": "integer", "multipleOf": 1000003}', "in the schema after its %json, 'multipleOf'"),
        ('start: %json {"type": "integer", "multiple\\u004ff": 1000003}', "in the schema after its %json, "),
        ('start: %json {"a": ', "no JSON follows %json"),
    ],
)  # fmt: skip
def test_slow_grammar_is_refused_before_it_is_compiled(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        demo_grammars().compile(grammar_of(ebnf=text)).result(timeout=60)


def rules_of_each_other(number: int) -> str:
    """Return rules that may be empty and start with another rule."""
    rules = [f"a{i}: a{(i + 1) % number} start | /[a-z]/ start | " for i in range(number)]
    return "\n".join([f"start: {' | '.join(f'a{i}' for i in range(number))}", *rules])


def rules_of_all(number: int) -> str:
    """Return rules that are alternatives of all rules."""
    names = " | ".join(f"a{i}" for i in range(number))
    return "\n".join(["start: a0", *(f'a{i}: {names} | "x"' for i in range(number))])


@pytest.mark.parametrize(
    "text",
    [rules_of_each_other(300), rules_of_all(100), "start: (" + '"a"? ' * 40 + '| "b"){900}', "start: " + '"a"{60000}'],
)
def test_rules_with_too_many_parses_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="too many rules with alternatives"):
        demo_grammars().compile(grammar_of(ebnf=text)).result(timeout=60)


@pytest.mark.parametrize(
    "text",
    [
        'root ::= root root root root | [a-z]* | ""',
        "start: a* \na: a a | /[a-z]/ | b |\nb: a a a | b b |",
    ],
)
def test_text_with_too_many_parses_fails_with_the_limit(text: str) -> None:
    constraint = demo_grammars().open(grammar_of(ebnf=text), [], 0)
    token_id = token_bytes().index(b"a")
    for _ in range(200):
        if constraint.error or not allowed(constraint):
            break
        constraint.advance(token_id)
    assert "more work than is allowed" in constraint.error


def test_forced_text_with_too_many_parts_is_refused() -> None:
    constraint = demo_grammars().open(grammar_of(ebnf='root ::= [a-z] x{3000}\nx ::= "b" "c"'), [], 0)
    while not constraint.error:
        constraint.advance(constraint.next_token if constraint.next_token >= 0 else allowed(constraint)[0])
    assert "has no alternatives and too many parts" in constraint.error


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ('root ::= "a" root', "root"),
        ('root ::= "a" b\nb ::= b', "b"),
        ('root ::= "a" my-longRule\nmy-longRule ::= ("x" | my-longRule) my-longRule', "my-longRule"),
        ('root ::= "a" | "b"\n', None),
        ('root ::= "a" | b\nb ::= "x" b', None),
        ('root ::= "a" b? b* b{0,2}\nb ::= "x" b', None),
        ('root ::= b+\nb ::= "x" b', "b"),
        ('root ::= (b+)+ | (b{2})\nb ::= "x" (b+)+', "b"),
        ('root ::= "a"\nb ::= b', None),
        ('root ::= b\nb ::= c | "x" b\nc ::= c', "b"),
        ('start: "a" [start]', None),
        ('start: "a" start\n  | "b"', None),
        ('start: "a" start // | "b"\n# | "c"', "start"),
        ('start: "a" start -> end', "start"),
        ('start: a{0,3} a~0..2 a{,3} [a | a] "b"i\n?a: a\ni: i', None),
        ("start: a{1,3}\na: a~2", "a"),
        ('start: a -> b\na: "x"\nb: b', None),
        ('start: "a" B\nB: /b|[^\\s\\S]/', None),
        ('start: a\na: "x" | "y"\nb[suffix=/[:a]/]: /a/ a', None),
        ('start: a\na: "x"\n%ignore (" " | "\\n")', None),
        ('start: a\na: "x" a\n%ignore (" " | "\\n")', "a"),
        ('start: %json {"type": "integer"} start', "start"),
        ('start: p::0\np::_: "x" %if bit_set(2) | "y" p::incr([0:2])', None),
        ("start: (missing | other-missing) start | missing", None),
    ],
)
def test_rule_that_can_never_end_is_refused_by_its_name(text: str, rule: str | None) -> None:
    lark = any_to_lark(with_short_escapes(text))
    if rule is None:
        checked_lark(lark, lark_names(text))
    else:
        with pytest.raises(ValueError, match=f"the rule '{rule}' can never end"):
            checked_lark(lark, lark_names(text))


Node = str | tuple[str, list[list["Node"]]]
"""A terminal, a rule, or a group: what follows its bracket, and its alternatives."""

NODES = st.recursive(
    st.sampled_from(['"x"', "/[yz]+/", "a", "b", "start"]),
    lambda nodes: st.tuples(
        st.sampled_from([")", ")?", ")*", ")+", "){0,2}", "){2}", "]"]),
        st.lists(st.lists(nodes, max_size=3), min_size=1, max_size=2),
    ),
    max_leaves=8,
)
RULES = st.fixed_dictionaries(
    {name: st.lists(st.lists(NODES, max_size=3), min_size=1, max_size=3) for name in ("start", "a", "b")}
)


def written(node: Node) -> str:
    if isinstance(node, str):
        return node
    end, alternatives = node
    return ("[" if end == "]" else "(") + " | ".join(" ".join(map(written, nodes)) for nodes in alternatives) + end


def ends(node: Node, rules: dict[str, list[list[Node]]], depth: int) -> bool:
    """Return whether the node has a text whose rules are nested at most ``depth`` deep."""
    if isinstance(node, str):
        return node not in rules or (depth > 0 and any_ends(rules[node], rules, depth - 1))
    end, alternatives = node
    return end in (")?", ")*", "){0,2}", "]") or any_ends(alternatives, rules, depth)


def any_ends(alternatives: list[list[Node]], rules: dict[str, list[list[Node]]], depth: int) -> bool:
    return any(all(ends(node, rules, depth) for node in nodes) for nodes in alternatives)


@given(RULES)
def test_grammars_are_refused_exactly_if_no_text_completes_them(rules: dict[str, list[list[Node]]]) -> None:
    text = "\n".join(f"{name}: {written((':', alternatives))[1:-1]}" for name, alternatives in rules.items())
    if ends("start", rules, len(rules)):
        checked_lark(text, {})
        return
    with pytest.raises(ValueError, match="can never end") as caught:
        checked_lark(text, {})
    assert not ends(str(caught.value).split("'")[1], rules, len(rules))


def test_many_alternatives_and_rules_that_are_used_often_are_allowed() -> None:
    words = "start: (word space)*\nspace: " + '" "\nword: ' + " | ".join(f"w{i}" for i in range(400))
    words += "".join(f'\nw{i}: "w{i}" /[a-z]/* space?' for i in range(400))
    names = "start: T+\nT: " + " | ".join(f'"{i} "' for i in range(3000))
    for text in (words, names, 'start: e\ne: e "+" e | e "*" e | "(" e ")" | /[0-9]{1,9}/ ~ 1..3 | "-"{2} e'):
        walk(grammar_of(ebnf=text), 0, max_tokens=20)


def test_letters_of_gbnf_may_be_escaped() -> None:
    grammar = grammar_of(ebnf=r'root ::= "\u00e9\\u00e9" [\u00e9-\u00ff] "\U0001F600" "\u20ac"')
    assert accepts(grammar, r"é\u00e9ê😀€")
    letters = grammar_of(ebnf=r'root ::= "\u0041\u000a\u0022" [\u0041-\u005a] "\U00000061"')
    assert accepts(letters, 'A\n"Za')
    assert not accepts(letters, 'A\n"za')
    assert not accepts(grammar, r"é\u00e9a😀€")


@pytest.mark.parametrize(
    ("text", "fits", "does_not"),
    [
        ('root ::= ([a-z]+)? "!"', ["!", "ab!"], ["a1!", "ab"]),
        ('root ::= "<" (([ab]{2})*)+ ">"', ["<>", "<abba>"], ["<aba>"]),
        ('root ::= ( # ) of (it)\n word+\n )? "(" (([)]*)?)*\nword ::= "a" | "[" word "]"', ["(", "a[a]())"], ["[a("]),
        ('root ::= ("x"+)?\nrepeated-0 ::= "y"', ["", "xx"], ["y"]),
        ('root ::= ("a" "b"+)? ("c"+ | "d")* [(+)]+', ["(", "abbccd)+"], ["aab(", "b("]),
    ],
)  # fmt: skip
def test_repetitions_of_repetitions_are_read_in_gbnf(text: str, fits: list[str], does_not: list[str]) -> None:
    grammar = grammar_of(ebnf=text)
    assert [fit for fit in fits if not accepts(grammar, fit)] == []
    assert [text for text in does_not if accepts(grammar, text)] == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (rules_of_each_other(300), "too many rules"),
        ("root ::= (", "it is neither GBNF nor Lark: "),
        ('start: "a" & "b"', "'&' of terminals"),
    ],
)
def test_error_starts_with_the_reason(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=f"^{why}"):
        demo_grammars().compile(grammar_of(ebnf=text)).result(timeout=60)


def test_scan_takes_linear_time() -> None:
    for part in ("(", "(a)+", "((a", '"', "{ ", "{1", "a", "# ", "[", ")"):
        with_short_escapes("root ::= " + part * 30_000)
    checked_lark('start: "' + '\\"' * 30_000, {})
    checked_lark("start: /" + "\\/" * 30_000, {})
    parts = ("<", "a", "a[", "% ", "%a", "a ", "{", "{1", "{ 1,", "1", "-", "-> ", "::", "\na", "\n/", "(a|", ")")
    for part in parts:
        checked_lark(part * 30_000, {})
        lark_names(part * 30_000)

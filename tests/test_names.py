"""Checks names in the package: no vague class names, abbreviations, or synonyms of our terms."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache

import pytest

from aioengine.api.args import ARGUMENTS
from aioengine.api.foreign_names import ALIASES
from tests.kit.source import Function, Module, classes, module, modules
from tests.test_floors import floor_of

CLASS_WORDS = "Manager Handler Helper Util Utils Wrapper Processor Context Mixin Base".split()
"""Forbidden as the name of a class or its last word, except in LogitsProcessor."""

ABBREVIATIONS = "req reqs seq seqs tok toks cfg mgr fi fa ctx proc procs attn cnt bs idx".split()
"""Forbidden as a word of any name. Names of weights in checkpoints are strings and not checked."""

OTHER_WORDS = {
    "block_table": "page_table",
    "block_manager": "page allocator",
    "retract": "preempt",
    "retracted": "preempted",
    "warper": "logits processor",
    "guided": "structured output, grammar",
    "speculator": "proposer",
    "scheduler_output": "plan",
    "cached_len": "num_cached",
    "prefix_len": "num_cached",
    "seq_len": "num_tokens",
    "context_len": "context_length",
    "cache_position": "slot",
    "out_loc": "slot_mapping",
    "out_cache_loc": "slot_mapping",
    "req_to_token": "page_table",
    "inc_ref": "lock",
    "dec_ref": "unlock",
    "world_rank": "rank",
    "is_prefill": "(no phase in the scheduler)",
    "server_args": "settings",
    "stop_word": "stop string",
    "stop_words": "stop strings",
    "lora_id": "adapter",
}
"""Forbidden word -> the word to use."""

INNER_FLOORS = ("0", "1", "2", "2'", "2t", "3")
PUBLIC_ONLY = {"rid": "uid", "meta_info": "(floor 4 only)"}

SAME_NAME = {"__init__", "_base", "base", "torch"}
"""File names that several folders may have. (Kernels are not checked: they are named after their operation.)"""


def words(name: str) -> list[str]:
    """Return the words of a name: "num_pages" and "NumPages" have ["num", "pages"]."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]


def defined_names(of: Module) -> Iterator[tuple[str, int]]:
    """Yield the names that a file defines, with their lines."""
    yield of.name.rpartition(".")[2], 1
    for node in ast.walk(of.tree):
        if isinstance(node, Function | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno
        elif isinstance(node, ast.alias) and node.asname:
            yield node.asname, node.lineno


def wrong_names(of: Module) -> list[str]:
    errors = [(name, line, why) for name, line in defined_names(of) if (why := what_is_wrong(name, of))]
    errors += [(node.name, node.lineno, "a class is a thing") for node in classes(of.tree) if is_vague(node.name)]
    return sorted({f"{of.place}:{line}: {name}: {why}" for name, line, why in errors})


@cache
def wrong_word(name: str) -> str | None:
    """Return the error of a name. Cached, because most names are defined many times."""
    joined = f"_{'_'.join(words(name))}_"
    if short := next((word for word in ABBREVIATIONS if f"_{word}_" in joined), None):
        return f"write {short!r} out"
    if other := next((word for word in OTHER_WORDS if f"_{word}_" in joined), None):
        return f"the word is {OTHER_WORDS[other]!r}"
    return None


def what_is_wrong(name: str, of: Module) -> str | None:
    if of.place == "api/signatures.py" and name in {*ARGUMENTS, *ALIASES}:
        return None  # these are arguments of users
    if wrong := wrong_word(name):
        return wrong
    if name.startswith(("enable_", "disable_")) and floor_of(of.name) in INNER_FLOORS:
        return "a switch is positive, and has no enable_ or disable_"
    if name.startswith("n_"):
        return "a count starts with num_"
    if name in PUBLIC_ONLY and floor_of(of.name) in INNER_FLOORS:
        return f"a public name; here it is {PUBLIC_ONLY[name]!r}"
    return None


def is_vague(name: str) -> bool:
    return name.endswith(tuple(CLASS_WORDS)) and not name.endswith("LogitsProcessor")


def test_names_are_the_terms_of_the_field() -> None:
    assert [line for of in modules() for line in wrong_names(of)] == []


def test_no_two_files_have_the_same_name() -> None:
    places = [of.place.removesuffix(".py") for of in modules() if not of.place.startswith("kernels/")]
    stems = Counter(place.rpartition("/")[2] for place in places)
    model_types = {place.removeprefix("families/") for place in places if place.startswith("families/")}
    assert {stem for stem, count in stems.items() if count > 1} <= SAME_NAME | model_types


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("text/x.py", "class PageManager: ..."),
        ("text/x.py", "def f(req): ..."),
        ("text/x.py", "self.attn_mask = 1"),
        ("text/x.py", "import a as ctx"),
        ("scheduler/req.py", ""),
        ("memory/x.py", "block_table = []"),
        ("scheduler/x.py", "rid = 1"),
        ("settings/config.py", "class A:\n    enable_cache: bool = True"),
        ("text/x.py", "n_pages = 1"),
    ],
)
def test_wrong_name_is_detected(place: str, text: str) -> None:
    assert len(wrong_names(module(place, text))) == 1

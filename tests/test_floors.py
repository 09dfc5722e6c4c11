"""Checks which modules may import each other (the floors of the design), and that there are no import cycles."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import NamedTuple

import pytest

from tests.kit.source import Import, Module, imports, module, modules


class Floor(NamedTuple):
    """``lines``: groups of modules. In a group, a module may import only modules to its right. ``below``: floors
    that may be imported. ``packages``: third-party packages. ``banned``: modules of the standard library."""

    lines: tuple[str, ...]
    below: str
    packages: str
    banned: str = ""


CLOCK_AND_LOOP = "asyncio time threading multiprocessing subprocess socket selectors"

FLOORS = {
    "0": Floor(
        (
            "settings.resolve > settings.memory_model > model_files > families > settings.machine > settings.config",
            "api.params > constraints, api.parameter_table > constraints.patterns, protocol",
            "media.placeholders > media.tokens > plugins, media",
            "api.checks > errors",
            "logs",
            "file_descriptors",
            "api.foreign_names",
            "settings.page_groups",
            "parsing",
            "api, settings",
        ),
        "0",
        "msgspec regex",
        CLOCK_AND_LOOP,
    ),
    "1": Floor(("scheduler > memory", "text"), "0", "msgspec regex", CLOCK_AND_LOOP),
    "1'": Floor(("media.pictures",), "0", "PIL"),
    "2g": Floor(("constraints.grammars",), "0 1 2t", "llguidance numpy msgspec"),
    "2t": Floor(
        ("tokenization",),
        "0 1",
        "tokenizers jinja2 msgspec",
    ),
    "2'": Floor(("transport",), "0", "zmq msgspec"),
    "2": Floor(
        ("runner > models > layers > attention > quantization > kernels",),
        "0 1",
        "torch flashinfer filelock triton safetensors numpy msgspec",
        "asyncio",
    ),
    "3": Floor(
        ("processes > media.service, child_process",),
        "0 1 1' 2 2' 2g 2t",
        "torch zmq uvloop msgspec PIL numpy safetensors httpx",
    ),
    "3s": Floor(("supervision",), "0 1 2'", "msgspec uvloop ray"),
    "4": Floor(
        (
            "utils, http > api.sync > api.engine, settings.planning"
            " > api.selfcheck, api.signatures"
            " > api.map_items > api.jobs > api.stream, api.journal > frontend > api.args, api.answers, media.intake"
            " > frontend.portal",
        ),
        "0 1 1' 2' 2t 3s",
        "uvloop msgspec tqdm numpy typing_extensions",
    ),
    "4r": Floor(("ray",), "4", "ray pyarrow"),
    "4m": Floor(("metrics", "tracing"), "0 4", "prometheus_client opentelemetry"),
    "4o": Floor(("openai",), "0 4 4m", "fastapi starlette msgspec prometheus_client"),
    "5": Floor(("__main__ > cli", "testing"), "0 1 1' 2 2' 2t 3 3s 4 4o", "*"),
    "root": Floor(("aioengine",), "0 1 2' 2t 3s 4", ""),
}

STRICTER = {"supervision/ledger.py": "1", "supervision/routing.py": "1"}
"""Parts of a floor that obey the rules of a lower one."""

ALLOWED = {
    ("model_files", "huggingface_hub"): "the one lazy import: it is slow, and most programs read a local folder",
    ("model_files", "threading"): "downloads side by side",
    ("model_files", "time"): "a limit for the patterns of a config",
    ("models", "transformers"): "vision towers",
    ("runner", "time"): "durations of loading and of steps",
}


def words(line: str) -> list[str]:
    return line.replace(">", " ").replace(",", " ").split()


UNITS = {word for floor in FLOORS.values() for line in floor.lines for word in words(line)}


def unit(name: str) -> str:
    """Return the longest prefix of a dotted name in the table, such as "text" for "aioengine.text.stop"."""
    parts = name.split(".")[1:]
    prefixes = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    part = next((prefix for prefix in prefixes if prefix in UNITS), parts[0] if parts else "aioengine")
    return part if part.islower() else "aioengine"


def floor_of(name: str) -> str | None:
    for floor, rule in FLOORS.items():
        for line in rule.lines:
            if unit(name) in words(line):
                return floor
    return None


def is_right_of(line: str, importer: str, imported: str) -> bool:
    groups = [group.replace(",", " ").split() for group in line.split(">")]
    place = {word: index for index, group in enumerate(groups) for word in group}
    return place.get(imported, -1) > place[importer]


def own_floor_allows(floor: Floor, importer: str, imported: str) -> bool:
    """Return whether a part of a floor may import another: right of it, or on floor 0 in another line."""
    mine = next(line for line in floor.lines if importer in words(line))
    if importer == imported or is_right_of(mine, importer, imported):
        return True
    return floor is FLOORS["0"] and imported not in mine.replace(">", " ").split()


def violation(of: Module, entry: Import) -> str | None:
    """Return the error of this import, or None."""
    part, top = unit(of.name), entry.target.split(".")[0]
    floor_name = next((low for path, low in STRICTER.items() if of.place.startswith(path)), floor_of(of.name))
    if floor_name is None:
        return "this module has no floor; give it one in tests/test_floors.py"
    floor = FLOORS[floor_name]
    if (part, top) in ALLOWED or (part, entry.target) in ALLOWED:
        return None
    if top == "aioengine":
        return aioengine_violation(of, entry, floor_name)
    if top in sys.stdlib_module_names:
        return f"floor {floor_name} may not import {top}" if top in floor.banned.split() else None
    return (
        None if floor.packages == "*" or top in floor.packages.split() else f"floor {floor_name} may not import {top}"
    )


def aioengine_violation(of: Module, entry: Import, floor_name: str) -> str | None:
    target = floor_of(entry.target)
    if target is None:
        return f"{entry.target} has no floor; give it one in tests/test_floors.py"
    if target == "root":
        return "import from the module that defines it, not from the package root"
    if target == floor_of(of.name):
        is_fine = own_floor_allows(FLOORS[target], unit(of.name), unit(entry.target))
        return None if is_fine else f"{unit(of.name)} may not import {unit(entry.target)}, beside or above it"
    if target not in FLOORS[floor_name].below.split():
        return f"floor {floor_name} may not import floor {target}"
    if floor_name == "2" and target == "1" and not entry.target.startswith("aioengine.scheduler.plan."):
        return "of floor 1, the runner may know StepPlan, Row and StepResult only"
    return None


def violations(of: Module) -> list[str]:
    entries = ((entry, violation(of, entry)) for entry in imports(of))
    return [f"{of.place}:{entry.line}: import of {entry.target}: {wrong}" for entry, wrong in entries if wrong]


def test_every_part_that_has_a_floor_exists() -> None:
    named = {part for floor in FLOORS.values() for line in floor.lines for part in words(line)}
    assert named == {unit(of.name) for of in modules()}


def test_imports_follow_the_floors() -> None:
    assert [line for of in modules() for line in violations(of)] == []


def test_only_processes_import_both_torch_and_zmq() -> None:
    for of in modules():
        packages = {entry.target.split(".")[0] for entry in imports(of)}
        assert not {"torch", "zmq"} <= packages or of.place.startswith("processes/"), of.place


def test_there_are_no_import_cycles() -> None:
    assert circles(modules(), with_typing=False) == set(), "these modules import each other"


def test_no_modules_import_each_other_for_types() -> None:
    assert circles(modules(), with_typing=True) == set(), "these modules import each other"


def circles(files: Iterable[Module], *, with_typing: bool) -> set[str]:
    """Return the modules in import cycles. ``with_typing``: including imports in functions and under TYPE_CHECKING."""
    files = tuple(files)
    names = {of.name for of in files}
    graph = {of.name: imported_modules(of, names, with_typing=with_typing) for of in files}
    return {name for name in graph if name in reachable(graph, name)}


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    ahead = [start]
    while ahead:
        new = graph[ahead.pop()] - seen
        seen |= new
        ahead.extend(new)
    return seen


def imported_modules(of: Module, names: set[str], *, with_typing: bool) -> set[str]:
    """Return the imported modules of the package. ``with_typing``: also those in functions and under TYPE_CHECKING."""
    targets = {entry.target for entry in imports(of) if with_typing or not (entry.is_typing or entry.is_inner)}
    modules_of_package = {
        next((part for part in (target, target.rpartition(".")[0]) if part in names), None) for target in targets
    }
    return {name for name in modules_of_package if name and name != of.name}


@pytest.mark.parametrize(("with_typing", "names"), [(False, {"b", "c"}), (True, {"a", "b", "c"})])
def test_import_cycles_are_detected(with_typing: bool, names: set[str]) -> None:
    files = [
        module("a.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from aioengine import b"),
        module("b.py", "from aioengine.c import f\nfrom aioengine import a"),
        module("c.py", "import aioengine.b"),
    ]
    assert circles(files, with_typing=with_typing) == {f"aioengine.{name}" for name in names}


@pytest.mark.parametrize(
    ("place", "text", "error"),
    [
        ("text/stop.py", "import torch", "may not import torch"),
        ("scheduler/core.py", "def f():\n    import time", "may not import time"),
        ("supervision/routing.py", "import asyncio", "may not import asyncio"),
        ("errors.py", "from aioengine import Engine", "package root"),
        ("memory/radix.py", "from aioengine.scheduler.request import Request", "beside or above it"),
        ("api/engine.py", "from aioengine.runner.rows import Rows", "may not import floor 2"),
        ("runner/sampling/sampler.py", "from aioengine.scheduler.request import Request", "StepPlan, Row"),
        ("surprise.py", "import os", "no floor"),
    ],
)
def test_wrong_import_is_detected(place: str, text: str, error: str) -> None:
    (line,) = violations(module(place, text))
    assert error in line

"""The package's source as syntax trees, for tests of code rules."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "aioengine"

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Module(NamedTuple):
    """One file. ``name`` is dotted, without ".__init__"; ``place`` is the path inside the package."""

    name: str
    place: str
    text: str
    tree: ast.Module

    @property
    def num_lines(self) -> int:
        return self.text.count("\n")


class Import(NamedTuple):
    """One imported module. ``is_typing``: under TYPE_CHECKING. ``is_inner``: inside a function."""

    target: str
    line: int
    is_typing: bool
    is_inner: bool


def module(place: str, text: str) -> Module:
    parts = place.removesuffix(".py").split("/")
    name = ".".join(["aioengine", *(part for part in parts if part != "__init__")])
    return Module(name, place, text, ast.parse(text))


@cache
def modules() -> tuple[Module, ...]:
    """Return every Python file of the package. Garbage collection is off, because it would take most of the time."""
    files = sorted(PACKAGE.rglob("*.py"))
    gc.disable()
    try:
        return tuple(module(str(file.relative_to(PACKAGE)), file.read_text()) for file in files)
    finally:
        gc.enable()
        gc.freeze()


def imports(of: Module) -> Iterator[Import]:
    """Yield every import of a module. "from x import y" counts as x.y, even if y is not a module."""
    yield from _imports(of.tree, is_typing=False, is_inner=False)


def _imports(node: ast.AST, *, is_typing: bool, is_inner: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, child.lineno, is_typing, is_inner) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield from (Import(f"{child.module}.{a.name}", child.lineno, is_typing, is_inner) for a in child.names)
        else:
            yield from _imports(
                child,
                is_typing=is_typing or (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)),
                is_inner=is_inner or isinstance(child, Function),
            )


def functions(tree: ast.AST) -> Iterator[tuple[str, Function]]:
    """Yield every function, method and inner function with its qualified name."""
    yield from _functions(tree, ())


def _functions(node: ast.AST, outer: tuple[str, ...]) -> Iterator[tuple[str, Function]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.ClassDef):
            name = (*outer, child.name)
            if isinstance(child, Function):
                yield ".".join(name), child
            yield from _functions(child, name)
        else:
            yield from _functions(child, outer)


def classes(tree: ast.AST) -> Iterator[ast.ClassDef]:
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def decorators(of: Function | ast.ClassDef) -> set[str]:
    """Return the last words of the decorators, such as {"overload", "property"}."""
    return {ast.unparse(node).partition("(")[0].rpartition(".")[2] for node in of.decorator_list}

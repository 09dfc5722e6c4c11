"""Rules of the code that a machine can judge: file sizes, annotations, broad excepts, globals, mixins, attributes."""

from __future__ import annotations

import ast

from tests.kit.source import Module, classes, functions, module, modules

MAX_FILE_LINES = 600

LONG_FILES: dict[str, str] = {
    "api/engine.py": "the public methods in one class; most lines are their documentation",
}
"""Files above ``MAX_FILE_LINES`` -> why they are not split."""

SEVERAL_BASES = {
    "errors.py:UnknownParameterError": "the contract lets callers catch it as TypeError or ValueError",
}


READ_BY_OTHERS = {"special_token_ids": "llguidance"}
"""Attributes that only another package reads."""


def long_files(files: tuple[Module, ...]) -> set[str]:
    return {file.place for file in files if file.num_lines > MAX_FILE_LINES}


def mixins(file: Module) -> list[str]:
    """Return classes with more than one base class. Protocol and Generic do not count."""
    names: list[str] = []
    for node in classes(file.tree):
        bases = [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases]
        if len([base for base in bases if base not in {"Protocol", "Generic"}]) > 1:
            names.append(f"{file.place}:{node.name}")
    return names


def unannotated(file: Module) -> list[str]:
    """Return functions with a parameter or a result without a type."""
    lines: list[str] = []
    for name, function in functions(file.tree):
        parameters = function.args
        named = [*parameters.posonlyargs, *parameters.args, *parameters.kwonlyargs]
        named += filter(None, (parameters.vararg, parameters.kwarg))
        bare = [entry.arg for entry in named if entry.annotation is None and entry.arg not in {"self", "cls"}]
        if bare or function.returns is None:
            lines.append(f"{file.place}:{name}: {', '.join(bare) or 'return'}")
    return lines


def hiding_excepts(file: Module) -> list[str]:
    """Return broad handlers that neither raise nor use the exception."""
    lines: list[str] = []
    for node in ast.walk(file.tree):
        if isinstance(node, ast.ExceptHandler) and is_broad(node):
            inner = [part for statement in node.body for part in ast.walk(statement)]
            raises = any(isinstance(part, ast.Raise) for part in inner)
            uses = node.name and any(isinstance(part, ast.Name) and part.id == node.name for part in inner)
            if not raises and not uses:
                lines.append(f"{file.place}:{node.lineno}")
    return lines


def is_broad(handler: ast.ExceptHandler) -> bool:
    broad = {"Exception", "BaseException"}
    return handler.type is None or any(
        isinstance(part, ast.Name) and part.id in broad for part in ast.walk(handler.type)
    )


def unread_attributes(files: tuple[Module, ...]) -> set[str]:
    """Return attributes of ``self`` that are set but never read, for example because of a renaming."""
    written: set[str] = set()
    read = set(READ_BY_OTHERS)
    for node in (node for file in files for node in ast.walk(file.tree)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            read.add(node.attr)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
            written.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            read.add(node.value)  # for getattr
    return {name for name in written - read if not name.startswith("__")}


def test_files_are_short_or_have_a_reason() -> None:
    assert long_files(modules()) == set(LONG_FILES)


def test_no_mixins() -> None:
    assert {name for file in modules() for name in mixins(file)} == set(SEVERAL_BASES)


def test_everything_is_annotated() -> None:
    assert [line for file in modules() for line in unannotated(file)] == []


def test_no_global_statement_and_no_write_to_frozen_objects() -> None:
    for file in modules():
        assert not any(isinstance(node, ast.Global) for node in ast.walk(file.tree)), file.place
        assert "object.__setattr__" not in file.text, file.place


def test_broad_excepts_raise_or_use_the_error() -> None:
    assert [line for file in modules() for line in hiding_excepts(file)] == []


def test_attributes_that_are_set_are_read() -> None:
    assert unread_attributes(modules()) == set()


def test_violations_are_detected() -> None:
    bad = "def f(a, b: int) -> None:\n  try: pass\n  except Exception: pass\n"
    unread = "class A:\n def f(self):\n  self.is_old, self.is_new = False, True\n  return self.is_new"
    assert long_files((module("x.py", "x = 1\n" * 601),)) == {"x.py"}
    assert mixins(module("x.py", "class A(B, C): ...")) == ["x.py:A"]
    assert unannotated(module("x.py", bad)) == ["x.py:f: a"]
    assert hiding_excepts(module("x.py", bad)) == ["x.py:3"]
    assert unread_attributes((module("x.py", unread),)) == {"is_old"}

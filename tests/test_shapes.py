"""Docstrings of tensor functions contain the shapes of their arguments and results."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.kit.source import Function, Module, decorators, functions, module, modules

FOLDERS = ("runner/", "models/", "layers/", "attention/", "quantization/", "kernels/")
ARRAYS = re.compile(r"\b(Tensor|NDArray|Ints32|Ints64|Floats|Words|Pages)\b")


def takes_arrays(function: Function) -> bool:
    given = function.args
    annotations = [entry.annotation for entry in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return any(entry is not None and ARRAYS.search(ast.unparse(entry)) for entry in [*annotations, function.returns])


def without_shapes(of: Module) -> Iterator[str]:
    """Return functions of tensors without a shape such as [T, D] in the docstring. Triton kernels take pointers."""
    for name, function in functions(of.tree):
        is_kernel = any("jit" in decorator for decorator in decorators(function))
        if takes_arrays(function) and not is_kernel and "[" not in (ast.get_docstring(function) or ""):
            yield f"{of.place}:{function.lineno}: {name}"


def test_tensor_functions_name_their_shapes() -> None:
    torch_modules = [of for of in modules() if of.place.startswith(FOLDERS)]
    assert [line for of in torch_modules for line in without_shapes(of)] == []


def test_missing_shapes_are_detected() -> None:
    file = module("layers/x.py", "def f() -> tuple[Tensor, int]: 'The sum.'\ndef g(x: Tensor) -> int: 'x: [T, D].'")
    assert list(without_shapes(file)) == ["layers/x.py:1: f"]

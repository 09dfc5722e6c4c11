"""Checks arguments that contain tensors: new weights, or an adapter."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from aioengine.api import checks
from aioengine.protocol.weight_messages import DTYPE_NAMES


def checked(argument: str, value: object) -> dict[str, Any]:
    """Check pairs of name and tensor, or a dict. Return name -> tensor [...].

    Raises:
        TypeError, ValueError: the value of ``argument`` is wrong.
    """
    torch: Any = sys.modules.get("torch")  # a program with tensors has imported it
    pairs: object = cast("Mapping[object, object]", value).items() if isinstance(value, Mapping) else value
    if not isinstance(pairs, Iterable):
        raise checks.wrong_type(argument, "pairs of name and tensor", value)
    tensors: dict[str, Any] = {}
    for pair in cast("Iterable[object]", pairs):
        if not isinstance(pair, tuple | list) or len(cast("Sequence[object]", pair)) != 2:
            raise checks.wrong_type(argument, "pairs of name and tensor", value)
        name, tensor = cast("Sequence[Any]", pair)
        text = checks.text("names of tensors", name)
        if torch is None or not isinstance(tensor, torch.Tensor):
            raise checks.wrong_type(f"{argument}[{text!r}]", "a torch.Tensor", tensor)
        if text in tensors:
            raise ValueError(f"{argument} has two tensors named {text!r}")
        _check(text, tensor)
        tensors[text] = tensor.detach()
    if not tensors:
        raise ValueError(f"{argument} is empty; give at least one tensor")
    return tensors


def check_format(value: object, *others: str) -> None:
    """Check ``load_format``: None, "auto" (for tensors: with the names and shapes of a checkpoint) or ``others``."""
    if value is not None:
        checks.choice("load_format", value, dict.fromkeys(("auto", *others)))


def _check(name: str, tensor: Any) -> None:
    """Raise ValueError for a tensor whose numbers cannot be copied as they are."""
    if str(tensor.layout) != "torch.strided":
        raise ValueError(f"{name} has the layout {tensor.layout}; give a dense tensor, such as tensor.to_dense()")
    if tensor.is_meta:
        raise ValueError(f"{name} is on the device 'meta', so it has no numbers; give a tensor on a CPU or a GPU")
    if hasattr(tensor, "full_tensor"):
        raise ValueError(f"{name} is a DTensor, which has only a part here; give tensor.full_tensor()")
    if str(tensor.dtype).removeprefix("torch.") not in DTYPE_NAMES:
        raise ValueError(f"{name} is of type {tensor.dtype}; allowed: {', '.join(DTYPE_NAMES)}")

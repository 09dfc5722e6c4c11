"""Checks arguments that contain tensors: new weights, or an adapter."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from aioengine.api import checks
from aioengine.protocol.weight_messages import DTYPE_NAMES

if TYPE_CHECKING:
    from collections.abc import Iterable


def checked(argument: str, value: object) -> dict[str, Any]:
    """Check pairs of name and tensor, or a dict. Return name -> tensor [...].

    Raises:
        TypeError, ValueError: the value of ``argument`` is wrong.
    """
    torch: Any = sys.modules.get("torch")  # a program with tensors has imported it
    pairs = value.items() if isinstance(value, Mapping) else value
    tensors: dict[str, Any] = {}
    try:
        for name, tensor in cast("Iterable[tuple[object, Any]]", pairs):
            text = checks.text("names of tensors", name)
            if torch is None or not isinstance(tensor, torch.Tensor):
                raise checks.wrong_type(f"{argument}[{text!r}]", "a torch.Tensor", tensor)
            if text in tensors:
                raise ValueError(f"{argument} has two tensors of the name {text!r}")
            _check(text, tensor)
            tensors[text] = tensor.detach()
    except (TypeError, ValueError) as error:
        if "unpack" in str(error) or "iterable" in str(error):
            raise checks.wrong_type(argument, "pairs of name and tensor", value) from None
        raise
    if not tensors:
        raise ValueError(f"{argument} is empty; give at least one tensor")
    return tensors


def check_format(value: object) -> None:
    """Check ``load_format`` of a call with tensors. Only one format works: names and shapes of a checkpoint."""
    if value is not None:
        checks.choice("load_format", value, {"auto": "auto"})


def _check(name: str, tensor: Any) -> None:
    """Raise ValueError for a tensor whose numbers cannot be copied as they are."""
    if str(tensor.layout) != "torch.strided":
        raise ValueError(f"{name} has the layout {tensor.layout}; give a dense tensor, such as tensor.to_dense()")
    if tensor.is_meta:
        raise ValueError(f"{name} is on the device 'meta', so it has no numbers; give a tensor on a CPU or a GPU")
    if hasattr(tensor, "full_tensor"):
        raise ValueError(f"{name} is a DTensor, which has only a part here; give tensor.full_tensor()")
    if str(tensor.dtype).removeprefix("torch.") not in DTYPE_NAMES:
        raise ValueError(f"{name} is of type {tensor.dtype}; what works: {', '.join(DTYPE_NAMES)}")

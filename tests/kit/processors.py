"""User-defined logits processors for tests of ``custom_logit_processor``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

NAMES = [f"tests.kit.processors:{name}" for name in ("Force", "Add", "Broken")]
FORCE, ADD, BROKEN = NAMES


class Force:
    """Allows only the parameter ``token``. With the parameter ``file``: kills its process once, in the third step."""

    def __init__(self) -> None:
        self._num_steps = 0

    def apply(self, logits: torch.Tensor, params: list[dict[str, Any]]) -> torch.Tensor:
        self._num_steps += 1
        for row, own in zip(logits, params, strict=True):
            kept = row[own["token"]].clone()
            row.fill_(-torch.inf)
            row[own["token"]] = kept
            if "file" in own and self._num_steps == 3 and not Path(own["file"]).exists():
                Path(own["file"]).touch()
                os._exit(1)
        return logits


class Add:
    """Adds ``bias`` to the logit of ``token`` in a new tensor."""

    def apply(self, logits: torch.Tensor, params: list[dict[str, Any]]) -> torch.Tensor:
        changed = logits.clone()
        for row, own in zip(changed, params, strict=True):
            row[own["token"]] += own["bias"]
        return changed


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise KeyError("no message")


ERRORS = {
    "raise": KeyError("missing"),
    "surrogate": ValueError("\ud800"),
    "long": ValueError("x" * 1_000_000),
    "message": UnprintableError(),
}


class Broken:
    """Fails in the way that the parameter ``how`` names, if there is one."""

    def apply(self, logits: torch.Tensor, params: list[dict[str, Any]]) -> Any:
        how = next((own["how"] for own in params if own), "")
        logits[0] = 5.0  # this change must be discarded
        match how:
            case "raise" | "surrogate" | "long" | "message":
                raise ERRORS[how]
            case "loop":
                while True:
                    pass
            case "none":
                return None
            case "shape":
                return logits[:, 1:]
            case "rows":
                return logits[:0]
            case "dtype":
                return logits.double()
            case "nan":
                return torch.full_like(logits, torch.nan)
            case "nothing":
                return torch.full_like(logits, -torch.inf)
            case _:
                return torch.zeros_like(logits).index_fill_(1, torch.tensor([7]), 1.0)


class NoProcessor:
    """Has no ``apply``."""

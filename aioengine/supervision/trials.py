"""Trials: which requests are suspected to have killed a process, and who goes on beside them. Pure."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container


class Blame(Enum):
    """Whose a crash was. NOBODY's are counted as restarts; a suspect's is not; with the one that proves its guilt, the
    one that made it a suspect is not counted any more either.
    """

    NOBODY = 0
    SUSPECT = 1
    GUILTY = 2


class Trials:
    """Which suspect goes on now, and with whom beside it.

    Attributes:
        suspects: uid -> the tokens that it has when it has got past its crash.
        on_trial: the suspect that goes on. is_alone: nothing else does.
    """

    def __init__(self) -> None:
        self.suspects: dict[int, int] = {}
        self.on_trial: int | None = None
        self.is_alone = False

    def admits(self, uid: int, *, has_begun: bool) -> bool:
        """Whether a request may go on now."""
        if self.on_trial is None or uid == self.on_trial:
            return True
        return has_begun and uid not in self.suspects and not self.is_alone

    def settle(self) -> bool:
        """Choose who is tried next, unless one is; whether that changed who may go on."""
        if self.on_trial is None and not self.suspects:
            return False
        if self.on_trial in self.suspects:
            return False
        self.is_alone = False
        self.on_trial = min(self.suspects, default=None)
        return True

    def crash(self, rows: Container[int]) -> Blame:
        """A process died in a step of these rows, which are all suspects now."""
        if self.on_trial in self.suspects and self.on_trial in rows:
            blame = Blame.GUILTY if self.is_alone else Blame.SUSPECT
            self.is_alone = True
            return blame
        if not self.is_alone:
            self.on_trial = None
        return Blame.NOBODY

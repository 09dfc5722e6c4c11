"""Trials: which requests are suspected to have killed a process, and what goes on beside each of them. Pure."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container


class Blame(Enum):
    """Who caused a crash.

    NOBODY: it counts as a restart. SUSPECT: the suspect on trial, so it does not count. GUILTY: the same suspect again,
    tried alone; then the crash that made it a suspect does not count any more, either.
    """

    NOBODY = 0
    SUSPECT = 1
    GUILTY = 2


class Trials:
    """The suspects, of which one at a time is on trial.

    Attributes:
        suspects: uid -> the number of tokens with which it has got past its crash.
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

    def clear(self, uid: int) -> None:
        """The request is no suspect, or has ended. ``settle`` then chooses another one."""
        self.suspects.pop(uid, None)

    def settle(self) -> bool:
        """Choose the next suspect on trial, unless there is one; returns whether other requests may go on now."""
        if self.on_trial in self.suspects or (self.on_trial is None and not self.suspects):
            return False
        self.is_alone = False
        self.on_trial = min(self.suspects, default=None)
        return True

    def crash(self, rows: Container[int]) -> Blame:
        """A process died in a step of these requests, which are all suspects now."""
        if self.on_trial in self.suspects and self.on_trial in rows:
            blame = Blame.GUILTY if self.is_alone else Blame.SUSPECT
            self.is_alone = True
            return blame
        if not self.is_alone:
            self.on_trial = None
        return Blame.NOBODY

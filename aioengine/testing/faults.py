"""Faults to inject at given steps. Steps are numbered from 1 in launch order; 0 means never."""

from __future__ import annotations

import os
import signal
import time

from msgspec import Struct


class InjectedFault(RuntimeError):
    """An injected failure."""


class Faults(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Faults of ``FakeRunner``.

    raise_at, collect_raise_at: ``launch`` or ``collect`` raises, in ``raise_times`` consecutive steps.
    fail_row_at: only the first sampled row of the step fails.
    stall_at, stall_s: the step takes ``stall_s`` longer. exit_at, exit_code: the process exits silently.
    kill_at: the process is killed. poison_token_id: the process is killed when a step computes this token (-1: never).
    raise_at_control, kill_at_control: the control call of this name raises, or kills the process.
    once: path of a file that does not exist. The first stall, exit or kill creates it. While it exists, there are no
        others, so the replacing process survives.
    start_error: building the runner fails with this message. start_s: time to build it.
    """

    raise_at: int = 0
    collect_raise_at: int = 0
    raise_times: int = 1
    fail_row_at: int = 0
    stall_at: int = 0
    stall_s: float = 0.0
    exit_at: int = 0
    exit_code: int = 1
    kill_at: int = 0
    poison_token_id: int = -1
    raise_at_control: str = ""
    kill_at_control: str = ""
    once: str = ""
    start_error: str = ""
    start_s: float = 0.0

    def on_start(self) -> None:
        """Call before the runner is built."""
        time.sleep(self.start_s)
        if self.start_error:
            raise InjectedFault(self.start_error)

    def on_launch(self, step: int) -> None:
        """Call at the start of the launch of a step."""
        if step == self.exit_at and self._happens():
            os._exit(self.exit_code)
        if step == self.kill_at and self._happens():
            os.kill(os.getpid(), signal.SIGKILL)
        if 0 < self.raise_at <= step < self.raise_at + self.raise_times:
            raise InjectedFault(f"launch of step {step}, as asked for by raise_at={self.raise_at}")

    def on_token(self, token_id: int) -> None:
        """Call for each token that a step computes."""
        if token_id == self.poison_token_id and self._happens():
            os.kill(os.getpid(), signal.SIGKILL)

    def on_collect(self, step: int) -> None:
        """Call when a step is collected."""
        if step == self.stall_at and self._happens():
            time.sleep(self.stall_s)
        if 0 < self.collect_raise_at <= step < self.collect_raise_at + self.raise_times:
            raise InjectedFault(f"collection of step {step}, as asked for by collect_raise_at={self.collect_raise_at}")

    def on_control(self, name: str) -> None:
        """Call for each control call of the runner."""
        if name == self.kill_at_control and self._happens():
            os.kill(os.getpid(), signal.SIGKILL)
        if name == self.raise_at_control:
            raise InjectedFault(f"control call {name!r}, as asked for by raise_at_control")

    def _happens(self) -> bool:
        if not self.once:
            return True
        try:
            os.close(os.open(self.once, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

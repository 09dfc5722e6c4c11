"""The types of launchers. Their interface is described in ``ProcessLauncher`` and ``ProcessChild``."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from aioengine.supervision.launchers._process_child import ProcessChild
    from aioengine.supervision.launchers._ray_launcher import RayChild, RayLauncher
    from aioengine.supervision.launchers.inline import InlineChild, InlineLauncher
    from aioengine.supervision.launchers.process import ProcessLauncher

    Launcher: TypeAlias = ProcessLauncher | InlineLauncher | RayLauncher

    RunningChild: TypeAlias = ProcessChild | InlineChild | RayChild
    """A child after its start, running or not."""

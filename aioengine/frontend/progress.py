"""Progress bars of long work in the children, on stderr and only where somebody looks at it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aioengine.frontend.progress_bar import Bar
    from aioengine.protocol.messages import Progress


def is_wanted(is_shown: bool | None) -> bool:
    """Whether bars are drawn; None: only where stderr is a terminal. Never where there is no stderr."""
    return sys.stderr is not None and (sys.stderr.isatty() if is_shown is None else is_shown)


class ProgressBars:
    """One bar for each label, until its work is done. ``is_shown`` as for ``is_wanted``."""

    def __init__(self, is_shown: bool | None) -> None:
        self.is_shown = is_wanted(is_shown)
        self._bars: dict[str, Bar] = {}

    def show(self, progress: Progress) -> None:
        """Draw how far the work is."""
        if not self.is_shown:
            return
        from aioengine.frontend.progress_bar import Bar

        bar = self._bars.get(progress.label)
        if bar is None:
            bar = Bar(desc=progress.label, total=progress.total, unit=progress.unit, file=sys.stderr, leave=False)
            self._bars[progress.label] = bar
        bar.total = progress.total
        bar.update(progress.done - bar.n)
        if progress.done >= progress.total:
            del self._bars[progress.label]
            bar.close()

    def close(self) -> None:
        """Remove what is left, also after a start that failed."""
        for bar in self._bars.values():
            bar.close()
        self._bars.clear()

"""Progress bars of long work in the children, on stderr and only where somebody looks at it."""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import TYPE_CHECKING

from aioengine.logs import log

if TYPE_CHECKING:
    from typing import TextIO

    from aioengine.frontend.progress_bar import Bar
    from aioengine.protocol.messages import Progress

logger = logging.getLogger(__name__)


def is_terminal(stream: TextIO | None) -> bool:
    """Whether ``stream`` is one. Programs put other objects in the place of their standard streams, closed ones too."""
    with contextlib.suppress(Exception):
        return stream is not None and stream.isatty()
    return False


def _is_notebook(stream: TextIO | None) -> bool:
    """Whether ``stream`` ends in a cell of a notebook, which draws bars, too."""
    return type(stream).__module__.partition(".")[0] == "ipykernel"


def is_wanted(is_shown: bool | None) -> bool:
    """Whether bars are drawn; None: where stderr is a terminal or a notebook. Never where it cannot be written to."""
    if not (is_terminal(sys.stderr) or _is_notebook(sys.stderr) if is_shown is None else is_shown):
        return False
    with contextlib.suppress(Exception):
        sys.stderr.write("")
        return True
    return False


class ProgressBars:
    """One bar for each label, until its work is done. ``is_shown`` as for ``is_wanted``."""

    def __init__(self, is_shown: bool | None) -> None:
        self.is_shown = is_wanted(is_shown)
        self._bars: dict[str, Bar] = {}

    def show(self, progress: Progress) -> None:
        """Draw how far the work is."""
        if not self.is_shown:
            return
        try:
            self._draw(progress)
        except Exception as error:  # of stderr: what it shows is no reason to fail
            log(logger, logging.DEBUG, "progress bars cannot be drawn: %s", error)
            self._drop()

    def _draw(self, progress: Progress) -> None:
        from aioengine.frontend.progress_bar import make_bar

        bar = self._bars.get(progress.label)
        if bar is None:
            bar = self._bars[progress.label] = make_bar(progress.label, progress.total, progress.unit)
        bar.total = progress.total
        bar.update(progress.done - bar.n)
        if progress.done >= progress.total:
            del self._bars[progress.label]
            bar.close()

    def close(self) -> None:
        """Remove what is left, also after a start that failed."""
        try:
            for bar in self._bars.values():
                bar.close()
        except Exception as error:
            log(logger, logging.DEBUG, "progress bars cannot be removed: %s", error)
        self._drop()

    def _drop(self) -> None:
        self.is_shown = False
        for bar in self._bars.values():
            bar.disable = True
        self._bars.clear()

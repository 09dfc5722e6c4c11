"""Progress bars of long work, on stderr if it is a terminal or a notebook."""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
import time
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from aioengine.logs import log
from aioengine.protocol.messages import Progress

if TYPE_CHECKING:
    from tqdm import tqdm


logger = logging.getLogger(__name__)

_BYTES_FORMAT = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}B/{total_fmt}B [{elapsed}<{remaining}, {rate_fmt}]"


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether ``stream`` is a terminal. Programs may replace it by any object, also by a closed file."""
    with contextlib.suppress(Exception):
        return stream is not None and stream.isatty()
    return False


def _is_notebook(stream: TextIO | None) -> bool:
    """Return whether ``stream`` writes to a cell of a notebook. Notebooks show bars, too."""
    return type(stream).__module__.partition(".")[0] == "ipykernel"


class NotebookLine:
    """One line of a notebook's cell, as a text file for tqdm. A carriage return clears the line.

    Used because text on stderr, and the widgets of tqdm, would stay in the saved notebook.
    """

    encoding = "utf-8"

    def __init__(self) -> None:
        display = importlib.import_module("IPython").display.display
        self._handle: Any = display({"text/plain": ""}, raw=True, display_id=True)
        self._line = ""

    def write(self, text: str) -> None:
        line = (self._line + text).rpartition("\r")[2].rstrip()
        if line != self._line:
            self._line = line
            self._handle.update({"text/plain": line}, raw=True)

    def flush(self) -> None:
        """Do nothing: every line is shown at once."""


def is_wanted(progress: bool | None) -> bool:
    """Return whether to draw bars. They need a stderr that can be written to. progress: see ``EngineConfig``."""
    if progress is None:
        progress = is_terminal(sys.stderr) or _is_notebook(sys.stderr)
    if not progress:
        return False
    with contextlib.suppress(Exception):
        sys.stderr.write("")
        return True
    return False


class ProgressBars:
    """One bar for each label until its work is done. In a notebook, all share a line."""

    def __init__(self, progress: bool | None) -> None:
        """progress: see ``EngineConfig``."""
        self.is_shown = is_wanted(progress)
        self._bars: dict[str, tqdm[NoReturn]] = {}
        self._notebook_line: NotebookLine | None = None

    def show(self, progress: Progress) -> None:
        """Draw the progress of one label."""
        if not self.is_shown:
            return
        try:
            self._draw(progress)
        except Exception as error:  # an error of stderr must not stop the start
            log(logger, logging.DEBUG, "progress bars cannot be drawn: %s", error)
            self._drop()

    def _draw(self, progress: Progress) -> None:
        bar = self._bars.get(progress.label)
        if bar is None:
            if _is_notebook(sys.stderr) and self._notebook_line is None:
                self._notebook_line = NotebookLine()
            bar = self._bars[progress.label] = _new_bar(
                self._notebook_line,
                desc=progress.label,
                total=progress.total,
                unit=progress.unit,
                unit_scale=progress.unit == "B",
                bar_format={"B": _BYTES_FORMAT, "": "{desc}"}.get(progress.unit),  # without a unit, only the label
                leave=False,
            )
        bar.total = progress.total
        bar.update(progress.done - bar.n)
        if progress.done >= progress.total:
            del self._bars[progress.label]
            bar.close()

    def close(self) -> None:
        """Remove the remaining bars, also after a failed start."""
        try:
            for bar in self._bars.values():
                bar.close()
        except Exception as error:
            log(logger, logging.DEBUG, "progress bars cannot be removed: %s", error)
        self._drop()

    def _drop(self) -> None:
        """Disable all bars. Later progress is not drawn."""
        self.is_shown = False
        for bar in self._bars.values():
            bar.disable = True
        self._bars.clear()


class RowBar:
    """The bar of a job: its rows, their output tokens per second, and the time left."""

    def __init__(self, total: int | None, progress: bool | None) -> None:
        """``total``: number of rows, if it is known. progress: see ``EngineConfig``."""
        self._bar: tqdm[NoReturn] | None = None
        self._num_tokens = 0
        self._began_at = time.monotonic()
        if is_wanted(progress):
            line = NotebookLine() if _is_notebook(sys.stderr) else None
            self._bar = _new_bar(line, desc="rows", total=total, unit=" rows")

    def add_tokens(self, num_tokens: int) -> None:
        self._num_tokens += num_tokens

    def advance(self) -> None:
        """Count one row."""
        if self._bar is None:
            return
        try:
            speed = self._num_tokens / max(time.monotonic() - self._began_at, 1e-3)
            self._bar.set_postfix_str(f"{speed:,.0f} tokens/s", refresh=False)
            self._bar.update()
        except Exception as error:  # an error of stderr must not end the job
            log(logger, logging.DEBUG, "the progress bar cannot be drawn: %s", error)
            self._bar.disable = True
            self._bar = None

    def close(self) -> None:
        """Leave the bar as it is. May be called twice."""
        if self._bar is not None:
            with contextlib.suppress(OSError, ValueError):  # stderr is closed
                self._bar.close()
            self._bar = None


def _new_bar(notebook_line: NotebookLine | None, **options: Any) -> tqdm[NoReturn]:
    """Return a bar on stderr or in a notebook. ``options``: arguments of tqdm."""
    from tqdm import tqdm  # slow to import, and most engines never draw a bar

    class Bar(tqdm):  # type: ignore[misc]  # it has no types
        """A bar without the thread that tqdm keeps for bars that do not move."""

        monitor_interval = 0

    return Bar(file=notebook_line or sys.stderr, position=0 if notebook_line else None, **options)

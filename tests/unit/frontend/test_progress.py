"""Progress bars: when they are drawn, and their text."""

from __future__ import annotations

import io
import sys
from types import ModuleType, SimpleNamespace

import pytest

from aioengine.frontend.progress import ProgressBars, is_wanted
from aioengine.protocol.messages import Progress


class Stream(io.StringIO):
    """A stream that may be a terminal."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


NotebookStream = type("OutStream", (Stream,), {"__module__": "ipykernel.iostream"})


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        (Stream(is_terminal=True), {None: True, True: True, False: False}),
        (Stream(is_terminal=False), {None: False, True: True, False: False}),
        (NotebookStream(is_terminal=False), {None: True, True: True, False: False}),
        (None, {None: False, True: False, False: False}),
    ],
)
def test_bars_are_drawn_on_terminals_or_on_request(
    stream: Stream | None, expected: dict[bool | None, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    assert {progress: is_wanted(progress) for progress in (None, True, False)} == expected


def drawn(*steps: Progress, monkeypatch: pytest.MonkeyPatch) -> str:
    stream = Stream(is_terminal=True)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("COLUMNS", "100")
    bars = ProgressBars(None)
    for step in steps:
        bars.show(step)
    bars.close()
    return stream.getvalue()


def test_bytes_are_shown_in_megabytes(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [Progress("loading weights", done, 200_000_000, "B") for done in (0, 100_000_000)]
    text = drawn(*steps, monkeypatch=monkeypatch)
    assert "0.00B/200MB [" in text
    assert "B/s]" in text


def test_counts_are_shown_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "0/12 [" in drawn(Progress("capturing CUDA graphs", 0, 12), monkeypatch=monkeypatch)


def test_a_start_of_one_step_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    text = drawn(Progress("starting the engine", 0, 1, ""), monkeypatch=monkeypatch)
    assert [line.strip() for line in text.split("\r") if line.strip()] == ["starting the engine"]


class NotebookCell:
    """The outputs of a cell that ``IPython.display.display`` creates and updates."""

    def __init__(self) -> None:
        self.outputs: list[str] = []
        self.shown: list[str] = []

    def display(self, data: dict[str, str], *, raw: bool, display_id: bool) -> SimpleNamespace:
        assert raw
        assert display_id
        place = len(self.outputs)
        self.outputs.append(data["text/plain"])

        def update(data: dict[str, str], *, raw: bool) -> None:
            self.outputs[place] = data["text/plain"]
            self.shown.append(data["text/plain"])

        return SimpleNamespace(update=update)


def test_bars_leave_one_empty_line_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    cell, stream = NotebookCell(), NotebookStream(is_terminal=False)
    ipython = ModuleType("IPython")
    vars(ipython)["display"] = SimpleNamespace(display=cell.display)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setattr(sys, "stderr", stream)
    bars = ProgressBars(None)
    bars.show(Progress("starting the engine", 0, 1, ""))
    bars.show(Progress("loading weights", 0, 200, "B"))
    bars.show(Progress("loading weights", 200, 200, "B"))
    bars.show(Progress("capturing CUDA graphs", 0, 12))
    bars.close()
    assert cell.shown[0] == "starting the engine"
    assert any(line.startswith("loading weights:   0%|") for line in cell.shown)
    assert any(line.startswith("capturing CUDA graphs:   0%|") for line in cell.shown)
    assert cell.outputs == [""]
    assert stream.getvalue() == ""

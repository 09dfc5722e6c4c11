"""Programs whose sys.stdout and sys.stderr are closed, missing, or objects of other kinds."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.kit.source import ROOT

pytestmark = pytest.mark.process

STREAMS = {
    "closed": "stream = open(os.devnull, 'w'); stream.close()",
    "none": "stream = None",
    "without methods": "stream = object()",
    "write alone": "stream = type('', (), {'write': lambda self, text: len(text)})()",
    "failing": """
class Failing:
    closed = False
    def write(self, text):
        raise RuntimeError('not here')
    flush = isatty = lambda self: self.write('')
stream = Failing()
""",
    "failing terminal": """
class Failing:
    encoding = 'utf-8'
    def isatty(self):
        return True
    def write(self, text):
        raise OSError('the terminal went away')
    def flush(self):
        pass
stream = Failing()
""",
}
BARS = """
from aioengine.frontend.progress import ProgressBars
from aioengine.protocol.messages import Progress

for progress in (None, True, False):
    bars = ProgressBars(progress)
    for done in range(4):
        bars.show(Progress("loading", done, 3, "B"))
    bars.show(Progress("more", 1, 3, "B"))
    bars.close()
"""
ENGINE = """
from aioengine import Engine
from aioengine.testing.fake_engine import fake_engine

with START as engine:
    os.kill(engine.get_all_child_pids()[1], 9)
    text = engine.generate("The capital of France is", {"max_new_tokens": 8, "temperature": 0})["text"]
    engine.generate("x", {"max_new_tokens": 1})
assert "Paris" in text, text
"""
WARNING = """
import warnings
from aioengine.logs import warn_caller

warn_caller("a warning", stacklevel=1)
warnings.simplefilter("error")
try:
    warn_caller("a warning", stacklevel=1)
except UserWarning as error:
    assert str(error) == "a warning"
else:
    raise SystemExit("the warning was lost")
"""
LOGGING = """
import logging
from aioengine.logs import warn

warn(logging.getLogger("aioengine.x"), "%d", 1)

class Broken(logging.Handler):
    def emit(self, record):
        raise RuntimeError("broken")

logging.getLogger().addHandler(Broken())
warn(logging.getLogger("aioengine.x"), "%d", 1)
"""


PROGRAMS = {"engine": ENGINE, "bars": BARS, "logging": LOGGING, "warning": WARNING}


@pytest.mark.parametrize(
    "stream", [pytest.param(name, marks=pytest.mark.slow) if name == "failing terminal" else name for name in STREAMS]
)
def test_engine_bars_logs_and_warnings_work(stream: str) -> None:
    """One after the other. A real model writes most: it runs with the stream that raises the most errors."""
    shows_progress = stream == "failing terminal"
    real = 'Engine(progress=True, tp_size=1, api_key="x", log_level="info")'
    start = real if shows_progress else 'fake_engine({"": " Paris."}, processes=True)'
    program = f"import os, sys\n{STREAMS[stream]}\nsys.stdout = sys.stderr = stream\n"
    for name, part in PROGRAMS.items():
        program += f"{part.replace('START', start)}\nos.write(1, b'{name} ')\n"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=90, check=False
    )
    assert done.stdout.split() == [*PROGRAMS], done

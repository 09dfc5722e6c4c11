"""Controls a headless Chromium through a pipe, without a port, a driver or a package."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

TIMEOUT_S = 60.0
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
    "--remote-debugging-pipe",
)  # fmt: skip
KEYS = {"Enter": 13, "Escape": 27, "Tab": 9}


class Page:
    """A tab. ``events``: the events of its domains so far (method and parameters)."""

    def __init__(self, commands: int, replies: int) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self._commands = commands
        self._replies = replies
        self._unread = b""
        self._num_commands = 0
        self._session: str | None = None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: object) -> dict[str, Any]:
        """Send a command, and return its result."""
        self._num_commands += 1
        number = self._num_commands
        command: dict[str, object] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            command["sessionId"] = self._session
        data = json.dumps(command).encode() + b"\0"
        while data:
            data = data[os.write(self._commands, data) :]
        while (message := self._read()).get("id") != number:
            if "method" in message:
                self.events.append((message["method"], message["params"]))
        assert "error" not in message, (method, message)
        result: dict[str, Any] = message["result"]
        return result

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            readable, _, _ = select.select([self._replies], [], [], TIMEOUT_S)
            data = os.read(self._replies, 1 << 20) if readable else b""
            assert data, "Chromium ended, or gives no answer"
            self._unread += data
        message, _, self._unread = self._unread.partition(b"\0")
        result: dict[str, Any] = json.loads(message)
        return result

    def open(self, url: str) -> None:
        self.send("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, or of its promise."""
        done = self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def wait(self, expression: str) -> None:
        """Wait until an expression is true."""
        until_at = time.monotonic() + TIMEOUT_S
        while not self.value(f"Boolean({expression})"):
            assert time.monotonic() < until_at, f"{expression} never holds; the page: {self.text()}"
            time.sleep(0.02)

    def text(self) -> str:
        """Return the visible text."""
        text: str = self.value("document.body.innerText")
        return text

    def type(self, text: str) -> None:
        self.send("Input.insertText", text=text)

    def press(self, key: str, code: str = "", *, alt: bool = False, shift: bool = False) -> None:
        """Press a key on the keyboard."""
        held = {"modifiers": alt + 8 * shift, "key": key, "code": code or key}
        number = KEYS.get(key, ord(key[-1].upper()))
        text = {"text": "\r"} if key == "Enter" else {}
        self.send("Input.dispatchKeyEvent", type="keyDown", windowsVirtualKeyCode=number, **held, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", windowsVirtualKeyCode=number, **held)

    def show(self, width: int, height: int, *, dark: bool = False) -> None:
        """Set the size of the window in CSS pixels, and the colors that the user prefers."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[feature])

    def of_event(self, method: str) -> list[dict[str, Any]]:
        """Return the parameters of the events with this name."""
        self.value("0")  # reads the events that have arrived
        return [parameters for name, parameters in self.events if name == method]


@contextmanager
def chromium(profile: Path) -> Iterator[Page]:
    """Start Chromium with an empty profile, or skip the test."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("needs Chromium (Debian's package chromium)")
    read_commands, commands = os.pipe()
    replies, write_replies = os.pipe()
    # Chromium reads commands from descriptor 3 and writes replies to 4.
    shell = f'exec "$@" 3<&{read_commands} 4>&{write_replies}'
    process = subprocess.Popen(
        ["bash", "-c", shell, "chromium", program, *FLAGS, f"--user-data-dir={profile}"],
        pass_fds=(read_commands, write_replies),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(read_commands)
    os.close(write_replies)
    try:
        yield Page(commands, replies)
    finally:
        os.close(commands)  # Chromium ends
        os.close(replies)
        process.kill()
        process.wait(TIMEOUT_S)

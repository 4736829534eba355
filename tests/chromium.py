"""Headless Chromium over its DevTools protocol, by a pipe: what a test of a page needs, and no library."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe",
)  # fmt: skip
# Chromium reads commands from descriptor 3 and answers on 4.
START = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
LIMIT_S = 60.0
KEYS = {"Tab": 9, "Enter": 13, "Escape": 27}


def path() -> str:
    """Where Chromium is; AssertionError that says how to get it."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    assert found, "there is no Chromium on the PATH: install one (Debian: apt-get install chromium)"
    return found


class Page:
    """One page of one browser. errors: what it has complained of. A context manager."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self._next, self._session, self._buffer = 0, None, b""
        self._folder = tempfile.mkdtemp(prefix="page-")

    def __enter__(self) -> Page:
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in (theirs_in, theirs_out)]
        command = [sys.executable, "-c", START, *map(str, high), path(), *FLAGS, f"--user-data-dir={self._folder}"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, pass_fds=high, **quiet)
        for fd in (theirs_in, theirs_out, *high):
            os.close(fd)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(Exception):
            self._session = None
            self.call("Browser.close")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        os.close(self._out)
        shutil.rmtree(self._folder, ignore_errors=True)

    def call(self, method: str, **params):
        """The result of one command."""
        self._next += 1
        message = {"id": self._next, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + LIMIT_S
        while True:
            answer = self._read(until)
            if answer.get("id") == self._next:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._note(answer)

    def _read(self, until: float):
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"no answer within {LIMIT_S:g} s"
            piece = os.read(self._in, 1 << 16)
            assert piece, "Chromium has ended"
            self._buffer += piece
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"])[:500])
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
        elif event.get("method") == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.errors.append(json.dumps(params["args"])[:500])
        elif event.get("method") == "Network.requestWillBeSent":
            url = params["request"]["url"]
            if not url.startswith(("file:", "about:", "blob:", "data:")):
                self.errors.append(f"asks the network for {url}")

    def open(self, file: Path) -> None:
        # From another document, lest it only go to another place in this one.
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=file.resolve().as_uri())
        self.wait("document.documentElement?.dataset.ready === 'yes'")

    def js(self, expression: str):
        """The value of an expression; a promise's, once it is there."""
        result = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, f"{expression}: {result['exceptionDetails']}"
        return result["result"].get("value")

    def wait(self, condition: str) -> None:
        until = time.monotonic() + LIMIT_S
        while not self.js(condition):
            assert time.monotonic() < until, f"never came true: {condition}\n{self.errors}"
            time.sleep(0.05)

    def click(self, selector: str) -> None:
        """With the mouse, in the middle of the first element that `selector` finds."""
        name = json.dumps(selector)
        self.js(f"document.querySelector({name}).scrollIntoView({{block: 'center', behavior: 'instant'}})")
        box = self.js(f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])"
                      f"(document.querySelector({name}).getBoundingClientRect())")  # fmt: skip
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def press(self, key: str) -> None:
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=KEYS[key], **text)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def size(self, width: int, height: int, *, phone: bool = False) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)

    def screenshot(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

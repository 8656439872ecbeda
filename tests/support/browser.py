"""A page in a real browser: headless Chromium, controlled over a pipe with the DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


def find_browser() -> str | None:
    """The first Chromium that is installed (Debian: ``apt-get install chromium-headless-shell``)."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page, opened as a user would.

    Args:
        program: path from :func:`find_browser`.
        folder: folder for the browser's own files.
    """

    def __init__(self, program: str, folder: Path) -> None:
        commands, self._write = os.pipe()
        self._read, answers = os.pipe()
        words = [
            program,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--remote-debugging-pipe",
            f"--user-data-dir={folder}",
            "about:blank",
        ]

        def at_their_places() -> None:  # DevTools reads from descriptor 3 and writes to 4
            os.dup2(commands, 3)
            os.dup2(answers, 4)

        self._process = subprocess.Popen(
            words, pass_fds=(3, 4), preexec_fn=at_their_places, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(commands)
        os.close(answers)
        self.requests: list[str] = []
        """URLs that the page requested."""
        self._left, self._number = b"", 0
        self._session: str | None = None

    def __enter__(self) -> Browser:
        targets = self._ask("Target.getTargets")["targetInfos"]
        (page,) = [found["targetId"] for found in targets if found["type"] == "page"]
        self._session = self._ask("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        self._ask("Page.enable")
        self._ask("Network.enable")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def open(self, page: Path, *, width: int, height: int = 900, dark: bool = False) -> None:
        """Load a page on a screen of the given width in CSS pixels."""
        self._ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._ask("Emulation.setEmulatedMedia", features=[scheme])
        self._ask("Page.navigate", url=page.absolute().as_uri())
        while self._next().get("method") != "Page.loadEventFired":
            pass

    def evaluate(self, expression: str) -> Any:
        """Evaluate JavaScript and return its JSON value; a promise is awaited."""
        answer = self._ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def point_at(self, x: float, y: float) -> None:
        """Move the mouse to a point of the visible page, and wait until the page is redrawn."""
        for dx in (2, 0):
            self._ask("Input.dispatchMouseEvent", type="mouseMoved", x=x + dx, y=y)
        self.evaluate("new Promise(done => setTimeout(done, 300))")

    def screenshot(self, file: Path, *, whole: bool = True) -> None:
        """Write a screenshot of the page as a PNG."""
        data = self._ask("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        file.write_bytes(base64.b64decode(data))

    def _ask(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        asked: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            asked["sessionId"] = self._session
        os.write(self._write, json.dumps(asked).encode() + b"\0")
        number = self._number
        while (answer := self._next()).get("id") != number:
            pass
        assert "error" not in answer, (method, answer)
        result: dict[str, Any] = answer["result"]
        return result

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            more = os.read(self._read, 1 << 16)
            assert more, "the browser has ended"
            self._left += more
        message, _, self._left = self._left.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        if found.get("method") == "Network.requestWillBeSent":
            self.requests.append(found["params"]["request"]["url"])
        return found

"""Debian's Chromium, headless, spoken to through two pipes in its DevTools protocol: a page is
loaded at a width, in light or dark, and asked what became of it."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TIMEOUT_S = 60


class Browser:
    """One tab. `told`: what the page has written to the console, with errors of its own."""

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive = send, receive
        self._text, self._number, self._session = b"", 0, ""
        self.told: list[str] = []
        self._events: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **values: object) -> dict[str, Any]:
        self._number += 1
        message: dict[str, object] = {"id": self._number, "method": method, "params": values}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            pass
        assert "error" not in answer, (method, answer)
        result: dict[str, Any] = answer["result"]
        return result

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._text:
            more = os.read(self._receive, 1 << 20)
            assert more, "the browser has ended"
            self._text += more
        text, _, self._text = self._text.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        name = message.get("method", "")
        self._events.append(name)
        if name in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            self.told.append(json.dumps(message["params"]))
        return message

    def open(self, page: Path, width: int, *, dark: bool = False, policy: bool = True) -> None:
        """`policy`: whether the page's content security policy counts."""
        self.call("Page.setBypassCSP", enabled=not policy)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.size(width, 900)
        self.told, self._events = [], []
        self.call("Page.navigate", url=page.absolute().as_uri())
        while "Page.loadEventFired" not in self._events:
            self._next()

    def size(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def picture(self, out: Path, height: int | None = None) -> None:
        """Save what is seen; `height`: None for the whole page."""
        width = self.ask("innerWidth")
        self.size(width, height or self.ask("document.documentElement.scrollHeight"))
        out.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """Skips where there is none, but fails in CI."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        reason = (
            "chromium is not installed: as root on Debian, run scripts/slurm/testbed.sh install"
        )
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
    to_it, send = os.pipe()
    receive, from_it = os.pipe()
    words = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    words += ["--remote-debugging-pipe", "--no-first-run", "--hide-scrollbars"]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        # The pipes are to be its descriptors 3 and 4.
        shell = f'exec 3<&{to_it} 4>&{from_it}; exec "$0" "$@"'
        process = subprocess.Popen(
            [
                *("timeout", str(TIMEOUT_S), "bash", "-c", shell),
                *(program, *words, f"--user-data-dir={home}"),
            ],
            pass_fds=(to_it, from_it),
            stderr=subprocess.DEVNULL,
        )
        os.close(to_it)
        os.close(from_it)
        try:
            yield Browser(send, receive)
        finally:
            process.terminate()
            process.wait()
            os.close(send)
            os.close(receive)

"""A headless Chromium, driven over a pipe: no library, no port."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from contextlib import contextmanager

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--remote-debugging-pipe",
)  # fmt: skip
PIPES = "3<&{} 4>&{}"
"""Where `--remote-debugging-pipe` reads requests and writes answers."""


def program():
    """Path of a Chromium, or None."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


@contextmanager
def browser(profile):
    """`profile`: an empty directory for what it writes."""
    child_reads, requests = os.pipe()
    answers, child_writes = os.pipe()
    command = [program(), *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(
        ["bash", "-c", f'exec "$@" {PIPES.format(child_reads, child_writes)}', "bash", *command],
        pass_fds=(child_reads, child_writes),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(child_reads)
    os.close(child_writes)
    try:
        tab = Tab(requests, answers)
        yield tab
        tab.call("Browser.close")
    finally:
        os.close(requests)
        os.close(answers)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Tab:
    """One page. `errors` has what its scripts raised and what its console says of errors."""

    def __init__(self, requests, answers):
        self._requests, self._answers = requests, answers
        self._text, self._number, self._session = b"", 0, None
        self.errors = []
        self._has_loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Page", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None and not method.startswith("Browser."):
            message["sessionId"] = self._session
        os.write(self._requests, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self._note(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _next(self):
        while b"\0" not in self._text:
            read = os.read(self._answers, 1 << 20)
            assert read, "the browser has ended"
            self._text += read
        message, _, self._text = self._text.partition(b"\0")
        return json.loads(message)

    def _note(self, event):
        method, params = event.get("method", ""), event.get("params", {})
        self._has_loaded |= method == "Page.loadEventFired"
        level = params.get("entry", {}).get("level") or params.get("type")
        if method == "Runtime.exceptionThrown" or (
            method in ("Log.entryAdded", "Runtime.consoleAPICalled") and level in ("error", "warning", "assert")
        ):
            self.errors.append(params)

    def open(self, page, *, width, dark=False):
        """Open a file's path or an address, in a window of `width` pixels."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1}
        self.call("Emulation.setDeviceMetricsOverride", mobile=width < 500, **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self._has_loaded = False
        self.call("Page.navigate", url=page if isinstance(page, str) else page.as_uri())
        while not self._has_loaded:
            self._note(self._next())

    def value(self, expression):
        """Of JavaScript."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def screenshot(self, path):
        """The whole page."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

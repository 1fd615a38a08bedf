"""A headless Chromium for tests of pages, over its debugging pipe."""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
LIMIT = 60
# Chromium reads from 3 and writes to 4.
START = """
import os, sys
first, second = map(int, sys.argv[1:3])
kept = os.dup2(first, 20), os.dup2(second, 21)
os.dup2(20, 3)
os.dup2(21, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find():
    """The path of a Chromium, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One tab. `errors` has what the console reports: errors and warnings."""

    def __init__(self):
        self._folder = tempfile.mkdtemp()
        to_read, self._out = os.pipe()
        self._in, to_write = os.pipe()

        arguments = [
            find(),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--remote-debugging-pipe",
            f"--user-data-dir={self._folder}",
            "about:blank",
        ]
        # Without a fork of this process, in which JAX has threads.
        self._process = subprocess.Popen(
            [sys.executable, "-c", START, str(to_read), str(to_write)]
            + arguments,
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._count, self._buffer, self._session = 0, b"", None
        self.errors, self.requests = [], []
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(x for x in targets if x["type"] == "page")
        self._session = self.call(
            "Target.attachToTarget", targetId=page["targetId"], flatten=True
        )["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + LIMIT
        while True:
            found = self._next(end)
            if found.get("id") == self._count:
                assert "error" not in found, (method, found)
                return found["result"]
            self._note(found)

    def _next(self, end):
        while b"\0" not in self._buffer:
            left = end - time.monotonic()
            ready, _, _ = select.select([self._in], [], [], max(left, 0))
            assert ready, "Chromium does not answer"
            self._buffer += os.read(self._in, 1 << 16)
        text, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(text)

    def _note(self, event):
        method, about = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(about)[:2000])
        if method == "Log.entryAdded":
            self.errors.append(about["entry"]["text"])
        if method == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])

    def resize(self, width, height=1000):
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def open(
        self,
        path,
        width=1400,
        height=1000,
        dark=False,
        query="",
        has="main",
        pause=0.3,
    ):
        """Opens a file, and waits for an element by its selector `has`."""
        self.resize(width, height)
        scheme = {
            "name": "prefers-color-scheme",
            "value": "dark" if dark else "light",
        }
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=path.absolute().as_uri() + query)
        ready = "document.readyState === 'complete'"
        self.wait(f"{ready} && !!document.querySelector({json.dumps(has)})")
        time.sleep(pause)

    def wait(self, condition):
        """Waits until an expression in the page is true."""
        end = time.monotonic() + LIMIT
        while not self.run(condition):
            assert time.monotonic() < end, (condition, self.errors)
            time.sleep(0.05)

    def run(self, script):
        """The value of an expression in the page."""
        found = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def picture(self, path):
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(data["data"]))

    def close(self):
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)
        shutil.rmtree(self._folder, ignore_errors=True)

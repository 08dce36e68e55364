"""A headless Chromium for tests, by the WebDriver protocol: JSON over HTTP to chromedriver, which needs no client."""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

CHROMIUM = shutil.which("chromium")
DRIVER = shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="no Chromium with its driver; .ci/install-chromium installs Debian's"
)
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the protocol's own name for a reference

Json = dict[str, object]


class Browser:
    """One window. Elements are found by CSS selector; what is not there is waited for."""

    def __init__(self, session: httpx2.Client, folder: Path) -> None:
        self._session = session
        self._folder = folder

    def ask(self, path: str, **body: object) -> object:
        answer = self._session.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["value"]

    def open(self, url: str) -> None:
        self.ask("url", url=url)

    def run(self, script: str, *values: object) -> object:
        """What a function body in the page returns."""
        return self.ask("execute/sync", script=script, args=list(values))

    def click(self, selector: str) -> None:
        """A page that draws a list anew between the look and the click is looked at once more."""
        for _ in range(20):
            answer = self._session.post(f"element/{self._find(selector)}/click", json={})
            if "stale element" not in answer.text:
                break
        assert answer.status_code == 200, answer.text

    def hover(self, selector: str) -> None:
        """Move the mouse's pointer to the middle of it."""
        at = {"type": "pointerMove", "duration": 0, "x": 0, "y": 0, "origin": {ELEMENT: self._find(selector)}}
        self.ask("actions", actions=[{"type": "pointer", "id": "mouse", "actions": [at]}])

    def prefer(self, scheme: str) -> None:
        """From now on the reader prefers "light" or "dark"."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.ask("goog/cdp/execute", cmd="Emulation.setEmulatedMedia", params={"features": features})

    def be_phone(self) -> None:
        """From now on the screen is a phone's: a window has a least width that is more."""
        params = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
        self.ask("goog/cdp/execute", cmd="Emulation.setDeviceMetricsOverride", params=params)

    def be_window(self) -> None:
        self.ask("goog/cdp/execute", cmd="Emulation.clearDeviceMetricsOverride", params={})

    def type(self, selector: str, text: str) -> None:
        self.ask(f"element/{self._find(selector)}/value", text=text)

    def clear(self, selector: str) -> None:
        self.ask(f"element/{self._find(selector)}/clear")

    def texts(self, selector: str) -> list[str]:
        found = self.run("return [...document.querySelectorAll(arguments[0])].map((one) => one.textContent)", selector)
        assert isinstance(found, list)
        return found

    def wait(self, condition: str, *values: object, seconds: float = 60) -> None:
        """Until an expression in the page is true."""
        deadline = time.monotonic() + seconds
        while not self.run(f"return Boolean({condition})", *values):
            assert time.monotonic() < deadline, f"never: {condition}; {self.texts('#problem')} {self.complaints()}"
            time.sleep(0.05)

    def screenshot(self, name: str) -> Path:
        answer = self._session.get("screenshot")
        path = self._folder / name
        path.write_bytes(base64.b64decode(answer.json()["value"]))
        return path

    def complaints(self) -> list[str]:
        """What the page wrote to the console since the last look."""
        found = self.ask("se/log", type="browser")
        assert isinstance(found, list)
        return [str(entry["message"]) for entry in found]

    def _find(self, selector: str) -> str:
        found = self.ask("element", using="css selector", value=selector)
        assert isinstance(found, dict)
        return str(found[ELEMENT])


@contextmanager
def browsing(folder: Path, *, width: int = 1360, height: int = 860) -> Iterator[Browser]:
    assert DRIVER is not None
    with subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, text=True) as driver:
        try:
            assert driver.stdout is not None
            said = next(line for line in driver.stdout if "successfully on port" in line)
            port = re.search(r"on port (\d+)", said)
            assert port is not None
            with _session(f"http://127.0.0.1:{port[1]}", folder, width, height) as session:
                yield Browser(session, folder)
        finally:
            driver.terminate()


@contextmanager
def _session(address: str, folder: Path, width: int, height: int) -> Iterator[httpx2.Client]:
    options = {
        "binary": CHROMIUM,
        "args": [
            "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            f"--window-size={width},{height}", f"--user-data-dir={folder / 'profile'}",
        ],
    }  # fmt: skip
    wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
    with httpx2.Client(timeout=120) as client:
        made = client.post(f"{address}/session", json={"capabilities": {"alwaysMatch": wanted}})
        assert made.status_code == 200, made.text
        path = f"{address}/session/{made.json()['value']['sessionId']}"
        with httpx2.Client(base_url=path, timeout=120) as session:
            try:
                yield session
            finally:
                client.delete(path)

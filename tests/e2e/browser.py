"""A headless Chromium, driven over WebDriver's HTTP protocol, for looking at pages as a person does."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


class Browser:
    """One window with an empty profile. As a context manager: closed at the end."""

    def __init__(self, profile: Path, *, width: int = 1300, height: int = 1000, dark: bool = False) -> None:
        """Width and height are the page's, in CSS pixels: that of a phone, too, which no window can have."""
        assert CHROMIUM and DRIVER
        self.width = width
        self.driver = subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, text=True)
        assert self.driver.stdout is not None
        port = next(
            found[1] for line in self.driver.stdout if (found := re.search(r"successfully on port (\d+)", line))
        )
        self.url = f"http://127.0.0.1:{port}/session"
        flags = [*FLAGS, f"--user-data-dir={profile}"]
        chrome = {
            "binary": CHROMIUM,
            "args": [*flags, *(["--blink-settings=preferredColorScheme=0"] if dark else [])],
            "mobileEmulation": {"deviceMetrics": {"width": width, "height": height, "pixelRatio": 1, "touch": False}},
        }
        wanted = {"goog:chromeOptions": chrome, "goog:loggingPrefs": {"browser": "ALL"}}
        self.url += "/" + self.ask("", capabilities={"alwaysMatch": wanted})["sessionId"]

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        with urlopen(Request(self.url, method="DELETE")):
            pass
        self.driver.terminate()
        self.driver.wait()
        assert self.driver.stdout is not None
        self.driver.stdout.close()

    def ask(self, command: str, **arguments: Any) -> Any:
        """A WebDriver command; returns its value."""
        body = json.dumps(arguments).encode()
        with urlopen(Request(f"{self.url}{command}", body, {"Content-Type": "application/json"})) as answer:
            return json.load(answer)["value"]

    def open(self, page: Path) -> None:
        """Load a file, scripts included."""
        self.ask("/url", url=page.as_uri())

    def run(self, script: str, *arguments: Any) -> Any:
        """Run JavaScript in the page; what it returns."""
        return self.ask("/execute/sync", script=script, args=list(arguments))

    def console(self) -> list[str]:
        """What the page has complained about."""
        return [entry["message"] for entry in self.ask("/se/log", type="browser")]

    def screenshot(self, file: Path) -> None:
        """The whole page, as tall as it is."""
        shot = self.ask("/goog/cdp/execute", cmd="Page.captureScreenshot", params={"captureBeyondViewport": True})
        file.write_bytes(base64.b64decode(shot["data"]))

    def print(self, file: Path) -> None:
        """The page on paper, as PDF, of the size that its style says."""
        params = {"preferCSSPageSize": True, "printBackground": False, "generateTaggedPDF": False}
        printed = self.ask("/goog/cdp/execute", cmd="Page.printToPDF", params=params)
        file.write_bytes(base64.b64decode(printed["data"]))

    def click(self, selector: str) -> None:
        """Click an element as a person does; a script's click is no reason to let a page use the clipboard."""
        (element,) = self.ask("/element", using="css selector", value=selector).values()
        self.ask(f"/element/{element}/click")

    def drag(self, *points: tuple[float, float]) -> None:
        """Press the mouse at the first point of the window, move through the others, and let go at the last."""
        (x, y), *others = ((round(x), round(y)) for x, y in points)
        moves = [{"type": "pointerMove", "x": x, "y": y} for x, y in others]
        actions = [
            {"type": "pointerMove", "x": x, "y": y},
            {"type": "pointerDown", "button": 0},
            *moves,
            {"type": "pointerUp", "button": 0},
        ]
        self.ask("/actions", actions=[{"type": "pointer", "id": "mouse", "actions": actions}])

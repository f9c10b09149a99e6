"""A headless Chromium driven over a pipe: DevTools messages, JSON ended by a zero byte."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--remote-debugging-pipe",
)
PATIENCE = 20.0  # seconds until an answer is given up on


def find() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Chromium:
    """One browser; `open` gives a fresh page in it."""

    def __init__(self, program: str, home: Path) -> None:
        inward, self.to = os.pipe()
        self.back, outward = os.pipe()
        # The browser reads commands from descriptor 3 and answers on 4.
        wired = f'exec "$@" 3<&{inward} 4>&{outward}'
        command = ["bash", "-c", wired, "browser", program, *FLAGS, f"--user-data-dir={home}"]
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen(
            command, pass_fds=(inward, outward), stdout=quiet, stderr=quiet
        )
        os.close(inward)
        os.close(outward)
        self.numbers = itertools.count(1)
        self.buffer = b""
        self.events: list[dict[str, Any]] = []

    def close(self) -> None:
        try:
            self.send("Browser.close")
            self.process.wait(PATIENCE)
        finally:
            self.process.kill()
            self.process.wait()
            os.close(self.to)
            os.close(self.back)

    def send(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        number = next(self.numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while (answer := self.receive()).get("id") != number:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def wait_for(self, method: str) -> dict[str, Any]:
        while True:
            for place, event in enumerate(self.events):
                if event.get("method") == method:
                    return self.events.pop(place)
            self.events.append(self.receive())

    def receive(self) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.back], [], [], max(0.0, end - time.monotonic()))
            piece = os.read(self.back, 1 << 20) if ready else b""
            if not piece:
                raise RuntimeError("the browser does not answer")
            self.buffer += piece
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)

    def open(self, path: Path, **settings: Any) -> Tab:
        return Tab(self, path, **settings)


class Tab:
    """One page: looks at it and does with it what a person would."""

    def __init__(
        self, browser: Chromium, path: Path, width: int = 1280, dark: bool = False,
        scripts: bool = True,
    ) -> None:  # fmt: skip
        self.browser = browser
        browser.events.clear()
        target = browser.send("Target.createTarget", url="about:blank")["targetId"]
        attached = browser.send("Target.attachToTarget", targetId=target, flatten=True)
        self.target, self.session = target, attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.resize(width)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.send("Page.navigate", url=path.as_uri())
        browser.wait_for("Page.loadEventFired")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self.browser.send(method, self.session, **parameters)

    def close(self) -> None:
        self.browser.send("Target.closeTarget", targetId=self.target)

    def resize(self, width: int, height: int = 900) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **size)

    def run(self, expression: str) -> Any:
        """The value of an expression, after the page has drawn itself once more."""
        after = (
            f"new Promise((go) => requestAnimationFrame(() => setTimeout(() => go({expression}))))"
        )
        answer = self.send(
            "Runtime.evaluate", expression=after, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def count(self, selector: str) -> int:
        return self.run(f"document.querySelectorAll({json.dumps(selector)}).length")

    def text(self, selector: str) -> str:
        return self.run(f"document.querySelector({json.dumps(selector)}).textContent")

    def texts(self, selector: str) -> list[str]:
        found = f"[...document.querySelectorAll({json.dumps(selector)})]"
        return self.run(f"{found}.map((node) => node.textContent)")

    def shown(self, selector: str) -> bool:
        return self.run(
            f"document.querySelector({json.dumps(selector)})?.checkVisibility() ?? false"
        )

    def box(self, selector: str) -> dict[str, float]:
        """Where an element is in the window, after it was scrolled into view."""
        node = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{node}.scrollIntoView({{block: 'center'}})")
        return self.run(f"{node}.getBoundingClientRect().toJSON()")

    def at(self, selector: str, across: float, down: float) -> tuple[float, float]:
        box = self.box(selector)
        return box["x"] + across * box["width"], box["y"] + down * box["height"]

    def mouse(self, kind: str, place: tuple[float, float], clicks: int = 0, held: int = 0) -> None:
        button = "left" if clicks or held else "none"
        where = {"x": place[0], "y": place[1], "button": button, "buttons": held}
        self.send("Input.dispatchMouseEvent", type=kind, clickCount=clicks, **where)

    def hover(self, selector: str, across: float = 0.5, down: float = 0.5) -> None:
        self.mouse("mouseMoved", self.at(selector, across, down))

    def click(self, selector: str, times: int = 1, across: float = 0.5, down: float = 0.5) -> None:
        place = self.at(selector, across, down)
        self.mouse("mouseMoved", place)
        for clicks in range(1, times + 1):
            self.mouse("mousePressed", place, clicks, held=1)
            self.mouse("mouseReleased", place, clicks)

    def drag(self, selector: str, start: tuple[float, float], end: tuple[float, float]) -> None:
        first, last = self.at(selector, *start), self.at(selector, *end)
        self.mouse("mouseMoved", first)
        self.mouse("mousePressed", first, 1, held=1)
        self.mouse("mouseMoved", last, held=1)
        self.mouse("mouseReleased", last, 1)

    def press(self, key: str) -> None:
        codes = {"Enter": 13, "Tab": 9, "ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "End": 35}
        text = {"text": "\r"} if key == "Enter" else {}
        named = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
        self.send("Input.dispatchKeyEvent", type="keyDown", **named, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", **named)

    def choose(self, selector: str, value: str) -> None:
        """What a select, a slider or a checkbox does when a person changes it."""
        node = f"document.querySelector({json.dumps(selector)})"
        self.run(
            f"({node}.value = {json.dumps(value)}, "
            f"{node}.dispatchEvent(new Event('input', {{bubbles: true}})))"
        )

    def complaints(self) -> list[dict[str, Any]]:
        """Errors, warnings and refused requests that the browser has told of so far."""
        self.run("0")
        kinds = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
        return [event for event in self.browser.events if event.get("method") in kinds]

    def requests(self) -> list[str]:
        self.run("0")
        asked = [e for e in self.browser.events if e.get("method") == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in asked]

    def screenshot(self, path: Path) -> Path:
        whole = self.send("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(whole["data"]))
        return path

"""A headless Chromium, driven over the DevTools protocol through a pipe: no package beyond the
standard library.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
WHY_NOT = "no chromium, chromium-browser or google-chrome on the PATH"
PATIENCE = 30.0  # seconds, for the slowest single answer on a busy machine
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--mute-audio",
    "--remote-debugging-pipe",
)
KEYS = {
    "Enter": 13,
    "Escape": 27,
    "Tab": 9,
    " ": 32,
    "PageUp": 33,
    "PageDown": 34,
    "End": 35,
    "Home": 36,
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowDown": 40,
}
TYPED = {"Enter": "\r", " ": " "}
FRAMES = "requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 0)))"
HOSTILE = (
    "</script><script>window.hit=1</script>",
    "<img src=x onerror='window.hit=2'>",
    "\"'`${window.hit=3}`",
    "\u202etfel ot thgir",
    "zero\u200bwidth",
    "nul\x00byte",
    "--><svg onload=window.hit=4>",
    "</style>",
    "{n}",
    "javascript:window.hit=5",
    "שלום",
    "\u2028line",
    "&lt;b&amp;",
    "%3Cscript%3E",
    "__proto__",
    "]]>",
)
"""What the text of a token may try."""


class BrowserError(AssertionError):
    """The page threw, or something that a test waited for did not come."""


class Browser:
    """A running Chromium. What it answers is matched by id; what it tells goes to the tab that it
    is about.
    """

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM is not None, WHY_NOT
        (theirs_in, self._out), (self._in, theirs_out) = map(_above_ten, (os.pipe(), os.pipe()))
        arguments = [CHROMIUM, *FLAGS, f"--user-data-dir={folder}", "about:blank"]
        silent = [(os.POSIX_SPAWN_OPEN, n, os.devnull, os.O_RDWR, 0) for n in (0, 1, 2)]
        pipes = [(os.POSIX_SPAWN_DUP2, theirs_in, 3), (os.POSIX_SPAWN_DUP2, theirs_out, 4)]
        actions = [*silent, *pipes]
        self._pid = os.posix_spawn(
            CHROMIUM, arguments, os.environ, file_actions=actions, setsid=True
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._last, self._rest = 0, b""
        self._answers: dict[int, dict[str, Any]] = {}
        self._tabs: dict[str, Tab] = {}

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Ask, and wait for the answer."""
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        mine, until = self._last, time.monotonic() + PATIENCE
        while mine not in self._answers:
            self.listen(until - time.monotonic())
            if time.monotonic() > until:
                raise BrowserError(f"{method} was not answered in {PATIENCE} s")
        answer = self._answers.pop(mine)
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def listen(self, seconds: float) -> None:
        """Take in what comes within some seconds: one read at most."""
        if not select.select([self._in], [], [], max(seconds, 0))[0]:
            return
        read = os.read(self._in, 1 << 20)
        if not read:
            raise BrowserError("the browser has gone away")
        *messages, self._rest = (self._rest + read).split(b"\0")
        for message in map(json.loads, messages):
            if "id" in message:
                self._answers[message["id"]] = message
            elif message.get("sessionId") in self._tabs:
                self._tabs[message["sessionId"]].told(message["method"], message["params"])

    def tab(self, width: int = 1280, height: int = 800) -> Tab:
        """A new tab of a size."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = self._tabs[session] = Tab(self, target, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            tab.call(f"{domain}.enable")
        tab.resize(width, height)
        return tab

    def frame(self) -> Tab:
        """The one frame with a process of its own, such as a sandboxed one."""
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            for found in self.call("Target.getTargets")["targetInfos"]:
                if found["type"] == "iframe":
                    target = found["targetId"]
                    answer = self.call("Target.attachToTarget", targetId=target, flatten=True)
                    frame = self._tabs[answer["sessionId"]] = Tab(self, target, answer["sessionId"])
                    for domain in ("Runtime", "Log", "Network"):
                        frame.call(f"{domain}.enable")
                    return frame
            self.listen(0.05)
        raise BrowserError("there is no frame")

    def close(self) -> None:
        """End it, with the processes that it started."""
        with suppress(BrowserError, OSError):
            self.call("Browser.close")
        with suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._in)
        os.close(self._out)


class Tab:
    """One page: what it is made to do, and what it said meanwhile: `errors`, and `requests`, the
    addresses it asked for.
    """

    def __init__(self, browser: Browser, target: str, session: str) -> None:
        self._browser, self._target, self._session = browser, target, session
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._loaded = 0

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **parameters)

    def told(self, method: str, told: dict[str, Any]) -> None:
        """An event: the ones that tests look at are kept."""
        if method == "Runtime.exceptionThrown":
            details = told["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and told["type"] in (
            "error",
            "warning",
            "assert",
        ):
            self.errors.append(
                " ".join(str(x.get("value", x.get("description"))) for x in told["args"])
            )
        elif method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.errors.append(told["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        elif method == "Page.loadEventFired":
            self._loaded += 1
        elif method == "Page.javascriptDialogOpening":
            self.errors.append(f"dialog: {told['message']}")

    def open(self, url: str) -> None:
        """Go to an address, and wait until it has loaded."""
        before = self._loaded
        self.call("Page.navigate", url=url)
        until = time.monotonic() + PATIENCE
        while self._loaded == before:
            self._browser.listen(0.2)
            if time.monotonic() > until:
                raise BrowserError(f"{url} did not load in {PATIENCE} s; it said {self.errors}")

    def js(self, expression: str) -> Any:
        """The value of an expression in the page; a promise is waited for."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise BrowserError(details.get("exception", {}).get("description", details["text"]))
        return answer["result"].get("value")

    def wait(self, expression: str, seconds: float = PATIENCE) -> None:
        """Wait until an expression is true."""
        until = time.monotonic() + seconds
        while not self.js(f"Promise.resolve({expression}).then(found => !!found)"):
            if time.monotonic() > until:
                raise BrowserError(f"never true: {expression}; the page said {self.errors}")
            self._browser.listen(0.03)

    def ready(self, url: str) -> Tab:
        """Go to a page of the package, and wait until it is drawn."""
        self.open(url)
        self.wait("document.documentElement.dataset.ready === 'yes'")
        return self.settle()

    def settle(self) -> Tab:
        """After the frame in which a change is drawn."""
        self.js(f"new Promise(done => {FRAMES})")
        return self

    def set(self, **state: Any) -> Tab:
        """Change the page's own state."""
        self.js(f"R.set({json.dumps(state)})")
        return self.settle()

    def state(self, *names: str) -> list[Any]:
        return [self.js(f"R.state.{name}") for name in names]

    def choose(self, name: str, value: str, event: str = "change") -> Tab:
        """Give a control of the page a value, as a reader does."""
        self.js(
            f"(x => {{ x.value = {json.dumps(value)}; x.dispatchEvent(new Event('{event}')); }})"
            f"(document.getElementById('{name}'))"
        )
        return self.settle()

    def text(self, selector: str) -> str:
        """What is read in the first element."""
        return str(self.js(f"document.querySelector({json.dumps(selector)}).innerText"))

    def text_of(self, name: str) -> str:
        """What an element contains, shown or not."""
        return str(self.js(f"document.getElementById('{name}').textContent"))

    def texts(self, selector: str, part: str = "textContent") -> list[Any]:
        """A property of every element."""
        return list(
            self.js(f"[...document.querySelectorAll({json.dumps(selector)})].map(x => x.{part})")
        )

    def count(self, selector: str) -> int:
        return int(self.js(f"document.querySelectorAll({json.dumps(selector)}).length"))

    def hover(self, place: str) -> None:
        """Let the pointer rest at the [x, y] that an expression gives, once it gives the same in
        two frames: what has just been drawn may still move.
        """
        self.wait(f"""(async place => {{
            const before = String(place());
            await new Promise(requestAnimationFrame);
            return String(place()) === before;
        }})(() => ({place}))""")
        x, y = self.js(place)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector: str, at: tuple[float, float] = (0.5, 0.5)) -> None:
        """A real click of the mouse, at a share of an element's width and height; it must be the
        one on top there.
        """
        place = self.js(f"""(() => {{
            const node = document.querySelector({json.dumps(selector)});
            if (!node) return null;
            node.scrollIntoView({{ block: "center", inline: "center", behavior: "instant" }});
            const box = node.getBoundingClientRect();
            const x = box.left + {at[0]} * box.width, y = box.top + {at[1]} * box.height;
            const top = document.elementFromPoint(x, y);
            const hit = !!top && (node.contains(top) || top.contains(node));
            return {{ x, y, hit, top: top && top.outerHTML.slice(0, 80) }};
        }})()""")
        if place is None or not place["hit"]:
            raise BrowserError(f"{selector} cannot be clicked: {place}")
        where = {"x": place["x"], "y": place["y"], "button": "left", "clickCount": 1}
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, **where)

    def drag(self, start: str, end: str) -> None:
        """Press on one element, move to another, let go."""
        centre = """(() => { const b = document.querySelector(%s).getBoundingClientRect();
            return [b.left + b.width / 2, b.top + b.height / 2]; })()"""
        (x0, y0), (x1, y1) = (self.js(centre % json.dumps(s)) for s in (start, end))
        path = [
            ("mouseMoved", x0, y0),
            ("mousePressed", x0, y0),
            ("mouseMoved", (x0 + x1) / 2, (y0 + y1) / 2),
            ("mouseMoved", x1, y1),
            ("mouseReleased", x1, y1),
        ]
        for kind, x, y in path:
            self.press(kind, x, y)

    def press(self, kind: str, x: float, y: float) -> None:
        """An event of the mouse with its left button down."""
        held = {"button": "left", "buttons": 1, "clickCount": 1}
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **held)

    def key(self, name: str, *, shift: bool = False) -> None:
        """Press and release a key: a letter, or a name of `KEYS`."""
        text = TYPED.get(name, name if len(name) == 1 else "")
        code = KEYS.get(name, ord(name[0].upper()))
        both = {"key": name, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **both)
        self.call("Input.dispatchKeyEvent", type="keyUp", **both)

    def type(self, text: str) -> None:
        """Write into what has the focus."""
        self.call("Input.insertText", text=text)

    def resize(self, width: int, height: int, *, mobile: bool = False) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)

    def prefers(self, **features: str) -> None:
        """What the reader asked the system for: color_scheme="dark", reduced_motion="reduce"."""
        asked = [
            {"name": f"prefers-{name.replace('_', '-')}", "value": value}
            for name, value in features.items()
        ]
        self.call("Emulation.setEmulatedMedia", features=asked)

    def screenshot(self, path: Path) -> Path:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))
        return path

    def close(self) -> None:
        self._browser.call("Target.closeTarget", targetId=self._target)


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser with a profile of its own, gone afterwards."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        browser = Browser(Path(folder))
        try:
            yield browser
        finally:
            browser.close()


def _above_ten(pipe: tuple[int, int]) -> tuple[int, int]:
    """The same pipe on high numbers, so that giving a child its 3 and 4 overwrites neither end."""
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in pipe)
    for end in pipe:
        os.close(end)
    return high[0], high[1]

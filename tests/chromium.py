"""A page in Chromium without a window, driven over its debugging protocol."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp

DEADLINE_S = 60.0
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run")


class Page:
    """A page of a browser.

    Args:
        runner: Runs what is asynchronous.
        socket: The page's debugging socket.
    """

    def __init__(self, runner: asyncio.Runner, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._runner = runner
        self._socket = socket
        self._sent = 0

    def call(self, method: str, **settings: Any) -> dict[str, Any]:
        """Sends a command; returns its result."""
        return self._runner.run(asyncio.wait_for(self._call(method, settings), DEADLINE_S))

    async def _call(self, method: str, settings: dict[str, Any]) -> dict[str, Any]:
        self._sent += 1
        await self._socket.send_json({"id": self._sent, "method": method, "params": settings})
        while (answer := await self._socket.receive_json()).get("id") != self._sent:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def open(self, url: str, width: int, height: int) -> None:
        """Opens an address in a window of this size, in pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Page.navigate", url=url)
        self.wait("document.documentElement !== null && document.readyState == 'complete'")

    def run(self, script: str) -> Any:
        """Returns the value of an expression in the page, which may be a promise."""
        found = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in found:
            raise RuntimeError(f"{script}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def wait(self, condition: str) -> Any:
        """Waits until an expression is true; returns its value."""
        end = time.monotonic() + DEADLINE_S
        while not (value := self.run(condition)):
            if time.monotonic() > end:
                raise TimeoutError(f"{condition} is not true after {DEADLINE_S:g} s")
            time.sleep(0.05)
        return value


@contextmanager
def page() -> Iterator[Page]:
    """Gives a page of a new browser, and ends the browser."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        words = ["chromium", *FLAGS, "--remote-debugging-port=0", f"--user-data-dir={folder}"]
        browser = subprocess.Popen(
            [*words, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            with asyncio.Runner() as runner:
                session, socket = runner.run(_connect(Path(folder) / "DevToolsActivePort"))
                yield Page(runner, socket)
                runner.run(session.close())
        finally:
            browser.terminate()
            browser.wait(DEADLINE_S)


def is_installed() -> bool:
    """Whether there is a browser."""
    return shutil.which("chromium") is not None


async def _connect(port_file: Path) -> tuple[aiohttp.ClientSession, Any]:
    session = aiohttp.ClientSession()
    return session, await session.ws_connect(await _find(session, port_file), max_msg_size=0)


async def _find(session: aiohttp.ClientSession, port_file: Path) -> str:
    """Returns the debugging address of the browser's page, once it has one."""
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        if port_file.exists() and (lines := port_file.read_text().split()):
            async with session.get(f"http://127.0.0.1:{lines[0]}/json/list") as answer:
                for target in await answer.json():
                    if target["type"] == "page":
                        return str(target["webSocketDebuggerUrl"])
        await asyncio.sleep(0.05)
    raise TimeoutError(f"chromium has no page after {DEADLINE_S:g} s")

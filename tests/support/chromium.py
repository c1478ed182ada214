"""A headless Chromium, for tests of the status page; everything it made is gone at the end."""

from __future__ import annotations

import base64
import json
import shutil
import tempfile
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver import ActionChains
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

from mlxpool.common.closing import Closing
from support.pool import PATIENCE, until

# No sandbox: tests run as root in containers, too. The rest keeps it from asking for anything.
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
)


class Chromium(Closing):
    """Debian's, on loopback, with a profile of its own."""

    def __init__(self) -> None:
        """Skips the test where the program is missing."""
        programs = [shutil.which(name) for name in ("chromium", "chromedriver")]
        if not all(programs):
            pytest.skip("chromium is not installed (Debian: chromium, chromium-driver)")
        self._profile = tempfile.TemporaryDirectory(prefix="mlxpool-chromium-")
        options = Options()
        options.add_argument("about:blank")  # not its own page of news
        options.binary_location = str(programs[0])
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        for flag in (*FLAGS, f"--user-data-dir={self._profile.name}"):
            options.add_argument(flag)
        try:
            self.driver = webdriver.Chrome(options, Service(str(programs[1])))
        except BaseException:
            self._profile.cleanup()
            raise
        self.driver.set_script_timeout(PATIENCE)

    def open(self, url: str, *, dark: bool = False, width: int = 1280, height: int = 900) -> None:
        """In this colour scheme, at this width in pixels."""
        self.command("Emulation.setEmulatedMedia", media="", features=[
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        ])  # fmt: skip
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.command("Emulation.setDeviceMetricsOverride", **size)
        self.driver.get(url)

    def command(self, name: str, **arguments: Any) -> Any:
        """Of the DevTools protocol."""
        return self.driver.execute_cdp_cmd(name, arguments)

    def run(self, script: str) -> Any:
        """The value that a script returns."""
        return self.driver.execute_script(script)

    def text(self, selector: str) -> str:
        """Of the first element that matches, as it is seen; "" without one."""
        found = f"document.querySelector({json.dumps(selector)})"
        return str(self.run(f"return {found}?.innerText || ''"))

    def texts(self, selector: str) -> list[str]:
        """Of every element that matches."""
        found = f"document.querySelectorAll({json.dumps(selector)})"
        return list(self.run(f"return Array.from({found}, (node) => node.innerText)"))

    def shows(self, selector: str, text: str) -> None:
        """Wait until the first element that matches has this text in it."""
        until(lambda: text in self.text(selector), f"{selector} says {text!r}")

    def point_at(self, selector: str) -> None:
        """Move the mouse to the middle of the first element that matches."""
        found = self.driver.find_element("css selector", selector)
        ActionChains(self.driver).move_to_element(found).perform()

    def complaints(self) -> list[str]:
        """What the console had since the last call."""
        return [entry["message"] for entry in self._log("browser")]

    def events(self) -> list[dict[str, Any]]:
        """What DevTools told since the last call, each with `method` and `params`."""
        return [json.loads(entry["message"])["message"] for entry in self._log("performance")]

    def _log(self, name: str) -> list[dict[str, Any]]:
        return list(self.driver.get_log(name))  # type: ignore[no-untyped-call]

    def picture(self) -> bytes:
        """A PNG of the page, not only of what fits into the window."""
        taken = self.command("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(taken["data"])

    def close(self) -> None:
        try:
            self.driver.quit()
        finally:
            self._profile.cleanup()

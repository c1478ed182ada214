"""A headless Chromium for tests of the status page; removes its files at the end."""

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

# No sandbox, because tests also run as root in containers. The other flags suppress prompts.
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
    """Debian's Chromium, with a temporary profile."""

    def __init__(self) -> None:
        """Skips the test if Chromium is missing."""
        programs = [shutil.which(name) for name in ("chromium", "chromedriver")]
        if not all(programs):
            pytest.skip("chromium is not installed (Debian: chromium, chromium-driver)")
        self._profile = tempfile.TemporaryDirectory(prefix="mlxpool-chromium-")
        options = Options()
        options.add_argument("about:blank")  # the page to open in place of the start page
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
        """Opens a URL with this colour scheme and window size in pixels."""
        self.command("Emulation.setEmulatedMedia", media="", features=[
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        ])  # fmt: skip
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.command("Emulation.setDeviceMetricsOverride", **size)
        self.driver.get(url)

    def command(self, name: str, **arguments: Any) -> Any:
        """Runs a command of the DevTools protocol."""
        return self.driver.execute_cdp_cmd(name, arguments)

    def run(self, script: str) -> Any:
        """Runs a script; returns its value."""
        return self.driver.execute_script(script)

    def text(self, selector: str) -> str:
        """Returns the visible text of the first match; "" without a match."""
        node = f"document.querySelector({json.dumps(selector)})"
        return str(self.run(f"return {node}?.innerText || ''"))

    def texts(self, selector: str) -> list[str]:
        """Returns the visible text of every match."""
        nodes = f"document.querySelectorAll({json.dumps(selector)})"
        return list(self.run(f"return Array.from({nodes}, (node) => node.innerText)"))

    def wait_for_text(self, selector: str, text: str) -> None:
        """Waits until the first match contains the text."""
        until(lambda: text in self.text(selector), f"{selector} says {text!r}")

    def point_at(self, selector: str) -> None:
        """Moves the mouse to the middle of the first match."""
        element = self.driver.find_element("css selector", selector)
        ActionChains(self.driver).move_to_element(element).perform()

    def click(self, selector: str) -> None:
        """Clicks on the first match."""
        self.driver.find_element("css selector", selector).click()

    def write(self, selector: str, text: str) -> None:
        """Replaces the text of the first match."""
        element = self.driver.find_element("css selector", selector)
        element.clear()
        element.send_keys(text)

    def console_messages(self) -> list[str]:
        """Returns the console's messages since the last call.

        Messages about status 503 are left out: a busy machine causes them, and the page retries.
        """
        messages = [entry["message"] for entry in self._log("browser")]
        return [message for message in messages if "status of 503" not in message]

    def events(self) -> list[dict[str, Any]]:
        """Returns the DevTools events since the last call, each with `method` and `params`."""
        return [json.loads(entry["message"])["message"] for entry in self._log("performance")]

    def _log(self, name: str) -> list[dict[str, Any]]:
        return list(self.driver.get_log(name))  # type: ignore[no-untyped-call]

    def screenshot(self) -> bytes:
        """Returns a PNG of the whole page, not only of the window."""
        taken = self.command("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(taken["data"])

    def close(self) -> None:
        try:
            self.driver.quit()
        finally:
            self._profile.cleanup()

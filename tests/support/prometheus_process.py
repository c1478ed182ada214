"""A Prometheus process on loopback."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from mlxpool.common.closing import Closing
from support.free_ports import free_port
from support.pool import PATIENCE, until

SETTINGS = Path(__file__).parents[2] / "deploy" / "prometheus" / "prometheus.yml"


class Prometheus(Closing):
    """Debian's Prometheus with the settings of deploy/, but other targets and shorter intervals."""

    def __init__(self, broker: str, gateway: str, folder: Path) -> None:
        """`broker` and `gateway` are URLs. Skips the test if Prometheus is not installed."""
        program = shutil.which("prometheus")
        if program is None:
            pytest.skip("missing program: prometheus, of Debian's package of that name")
        settings = yaml.safe_load(SETTINGS.read_text("utf-8"))
        settings["global"] = {"scrape_interval": "200ms", "evaluation_interval": "200ms"}
        settings["rule_files"] = [str(SETTINGS.parent / name) for name in settings["rule_files"]]
        for job, url in zip(settings["scrape_configs"], (broker, gateway), strict=True):
            job["static_configs"][0]["targets"] = [url.removeprefix("http://")]
        config = folder / "prometheus.yml"
        config.write_text(yaml.safe_dump(settings))
        self.url = f"http://127.0.0.1:{free_port()}"
        self.log_path = folder / "prometheus.log"
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    program,
                    f"--config.file={config}",
                    f"--storage.tsdb.path={folder / 'tsdb'}",
                    f"--web.listen-address={self.url.removeprefix('http://')}",
                    "--log.level=warn",
                ],
                stdout=log,
                stderr=log,
            )
        try:
            until(self._ready, "Prometheus is ready")
        except BaseException:
            self.close()
            raise

    def _ready(self) -> bool:
        assert self.process.poll() is None, self.log_path.read_text()
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=PATIENCE) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, ConnectionError):
            return False

    def get(self, path: str, **query: str) -> Any:
        """Returns the `data` of a response of its HTTP API."""
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
            body = json.load(answer)
        assert body["status"] == "success", body
        return body["data"]

    def value(self, query: str) -> float | None:
        """Returns the value of a query with a single series; None if there is no series."""
        series = self.get("query", query=query)["result"]
        assert len(series) <= 1, series
        return float(series[0]["value"][1]) if series else None

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

"""`make images`: the steps of the Dockerfile as commands of this machine, without a daemon.

Folders of the image are below a temporary folder, and this Python replaces the base image's.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from dockerfile_parse import DockerfileParser

from support.pool import until

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parents[2]
FOLDERS = ("/src", "/wheels", "/opt/mlxpool")  # of the image
PATIENCE = 1200.0  # seconds for one step


class Builder:
    """Performs the instructions of a stage and of its bases."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("MLXPOOL")}
        base = root / "usr"
        subprocess.run([sys.executable, "-m", "venv", base], check=True, timeout=PATIENCE)
        self.environment["PATH"] = f"{base / 'bin'}:{os.defpath}"

    def here(self, text: str) -> str:
        for folder in FOLDERS:
            text = re.sub(rf"(?<![\w/]){folder}\b", f"{self.root}{folder}", text)
        return text

    def build(self, stage: str) -> None:
        (self.root / "src").mkdir(exist_ok=True)
        for name, value in self._instructions(stage):
            getattr(self, f"_{name.lower()}")(value)

    def _instructions(self, stage: str) -> Iterator[tuple[str, str]]:
        by_stage: dict[str, list[tuple[str, str]]] = {}
        bases: dict[str, str] = {}
        current = ""
        for line in DockerfileParser(str(ROOT / "deploy/docker/Dockerfile")).structure:
            if line["instruction"] == "FROM":
                base, _, current = line["value"].partition(" AS ")
                bases[current], by_stage[current] = base, []
            elif current and line["instruction"] != "COMMENT":
                by_stage[current].append((line["instruction"], line["value"]))
        if bases[stage] in by_stage:
            yield from self._instructions(bases[stage])
        yield from by_stage[stage]

    def _workdir(self, value: str) -> None:
        assert value == "/src"

    def _env(self, value: str) -> None:
        for word in value.replace("\\\n", " ").split():
            name, _, text = word.partition("=")
            text = self.here(text).replace("${PATH}", self.environment["PATH"])
            self.environment[name] = text

    def _copy(self, value: str) -> None:
        *sources, target = value.split()
        for source in sources:
            to = self.root / "src" / ("" if target == "./" else target)
            inner = [ROOT / source, to / source if target == "./" else to]
            subprocess.run(["cp", "-r", *inner], check=True, timeout=PATIENCE)

    def _run(self, value: str) -> None:
        command = [self.here(word) for word in json.loads(value)] if value[0] == "[" else None
        done = subprocess.run(
            command or ["sh", "-c", self.here(value)],
            cwd=self.root / "src",
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert done.returncode == 0, f"{value}\n{done.stderr}"

    def run(self, *words: str) -> str:
        """Runs a program of the image; returns its output."""
        done = subprocess.run(
            words, env=self.environment, capture_output=True, text=True, timeout=PATIENCE
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


def pins() -> dict[str, set[str]]:
    """Returns the versions of each package in the constraints."""
    versions: dict[str, set[str]] = {}
    for line in (ROOT / "requirements" / "constraints.txt").read_text("utf-8").splitlines():
        if not line.startswith("#"):
            name, version = line.partition(";")[0].strip().split("==")
            versions.setdefault(name, set()).add(version)
    return versions


@pytest.mark.parametrize("image", ["broker", "cpu"])
def test_the_steps_of_an_image(image: str, tmp_path: Path) -> None:
    builder = Builder(tmp_path)
    builder.build(f"build-{image}")
    program = tmp_path / "opt" / "mlxpool" / "bin" / "mlxpool"
    assert "gateway" in builder.run(str(program), "--help")
    listed = json.loads(builder.run(str(program.with_name("pip")), "list", "--format", "json"))
    versions = {each["name"].lower().replace("_", "-"): each["version"] for each in listed}
    assert ("mlx" in versions) == (image == "cpu")
    ours = versions.keys() - {"mlxpool", "pip", "setuptools"}
    assert {name: versions[name] for name in ours if versions[name] not in pins()[name]} == {}
    size = builder.run("du", "-sm", str(tmp_path / "opt")).split()[0]
    print(f"{image}: {len(ours)} packages, {size} MB")
    if image == "cpu":
        answers_over_http(builder, str(program), tmp_path)


def answers_over_http(builder: Builder, program: str, folder: Path) -> None:
    import httpx

    log = folder / "log"
    command = [program, "--run-dir", str(folder / "run"), "serve", "--http", "127.0.0.1:0"]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stderr=out, env=builder.environment)
    try:
        pattern = re.compile(r"gateway is ready\"? url=(http://\S+)")
        url = until(lambda: pattern.search(log.read_text()), "it is ready")[1]
        body = {"model": "demo", "prompt": "def", "max_tokens": 4}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE)
        assert answer.json()["choices"][0]["finish_reason"] == "length"
    finally:
        process.terminate()
        process.wait(PATIENCE)

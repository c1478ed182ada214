"""Runs the settings and arguments of deploy/k8s as processes of this machine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import yaml

from support.pool import PATIENCE, until

BASE = Path(__file__).parents[2] / "deploy" / "k8s" / "base"
PORTS = ("7200", "7201", "9464")
MLXPOOL = (sys.executable, "-m", "mlxpool.cli.main")


@pytest.fixture
def ports() -> dict[str, str]:
    """A free port for each port of the manifests."""
    with ExitStack() as stack:
        held = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in PORTS]
        return {port: str(s.getsockname()[1]) for port, s in zip(PORTS, held, strict=True)}


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    """The public keys by name; writes the key files that the Secrets hold."""
    made = {}
    for name, role in (("broker", "server"), ("worker", "worker"), ("app", "client")):
        flags = ("keygen", name, "--role", role, "--folder", str(tmp_path / "keys"), "--json")
        done = subprocess.run([*MLXPOOL, *flags], capture_output=True, timeout=PATIENCE, check=True)
        made[name] = str(json.loads(done.stdout)["public"])
    (tmp_path / "keys" / "broker.pub").write_text(made["broker"])
    return made


def arguments(manifest: str) -> list[str]:
    """The arguments of a workload's container."""
    (workload,) = yaml.safe_load_all((BASE / manifest).read_text("utf-8"))
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    return list(container["args"])


def here(text: str, folder: Path, ports: dict[str, str]) -> str:
    """The text with the cluster's names and paths replaced by those of this machine."""
    for port, free in ports.items():
        text = text.replace(f":{port}", f":{free}")
    text = text.replace("0.0.0.0", "127.0.0.1").replace("mlxpool-back", "127.0.0.1")
    return text.replace("/keys/", f"{folder}/keys/").replace("/etc/mlxpool/", f"{folder}/")


@contextmanager
def running(words: Sequence[str], run_dir: str, log: Path) -> Iterator[None]:
    """Run `mlxpool` with these arguments meanwhile."""
    environment = {**os.environ, "MLXPOOL_RUN_DIR": run_dir}
    with log.open("wb") as out:
        process = subprocess.Popen([*MLXPOOL, *words], stdout=out, stderr=out, env=environment)
    try:
        yield
    finally:
        process.terminate()
        try:
            assert process.wait(PATIENCE) == 0, log.read_text()
        finally:
            process.kill()
            process.wait()


def ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=PATIENCE) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError):
        return False


def test_a_request_passes_through_broker_and_worker(
    tmp_path: Path, ports: dict[str, str], keys: dict[str, str]
) -> None:
    settings = here((BASE / "mlxpool.toml").read_text("utf-8"), tmp_path, ports)
    for name, role in (("worker", "worker"), ("app", "client")):
        settings += f'\n[keys.{name}]\nrole = "{role}"\npublic = "{keys[name]}"\n'
    (tmp_path / "mlxpool.toml").write_text(settings)
    broker = [here(word, tmp_path, ports) for word in arguments("broker.yaml")]
    worker = [here(word, tmp_path, ports) for word in arguments("worker-demo.yaml")]
    asked = [
        *("run", "demo", "def", "--max-tokens", "4", "--json"),
        *("--endpoint", f"tcp://127.0.0.1:{ports['7200']}"),
        *("--key", str(tmp_path / "keys" / "app.key"), "--server-key", keys["broker"]),
    ]
    with (
        TemporaryDirectory(prefix="mlxpool-") as one,
        TemporaryDirectory(prefix="mlxpool-") as other,
        running(broker, f"{one}/pool", tmp_path / "broker.log"),
    ):
        until(lambda: ready(f"http://127.0.0.1:{ports['9464']}"), "the broker is ready")
        with running(worker, f"{other}/pool", tmp_path / "worker.log"):
            done = subprocess.run(
                [*MLXPOOL, *asked], capture_output=True, text=True, timeout=PATIENCE
            )
            assert done.returncode == 0, done.stderr
            assert json.loads(done.stdout.splitlines()[-1])["reason"] == "length"

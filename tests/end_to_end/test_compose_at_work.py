"""Runs the services of deploy/compose.yaml as processes of this machine, with generated keys."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from mlxpool.client import Client
from support.deployment import answers, ports_of_deployments, running
from support.pool import PATIENCE, until

DEPLOY = Path(__file__).parents[2] / "deploy"
SCRIPT = DEPLOY / "docker" / "make-keys.sh"
SETTINGS = DEPLOY / "k8s" / "base" / "mlxpool.toml"
SERVICES: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))["services"]


def make_keys(folder: Path, settings: Path = SETTINGS) -> subprocess.CompletedProcess[str]:
    """Runs the service `keys`, with the image's folders in `folder`."""
    assert SERVICES["keys"]["entrypoint"] == ["sh", "/usr/local/bin/make-keys"]
    assert SERVICES["keys"]["command"] == ["/etc/mlxpool/mlxpool.toml", "/keys"]
    for name in ("broker", "worker", "gateway", "app"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["sh", str(SCRIPT), str(settings), str(folder)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={**os.environ, "PATH": path},
    )


def contents(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    done = make_keys(folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_each_service_gets_the_keys_that_it_needs(keys: Path) -> None:
    assert set(contents(keys)) == {
        "broker/broker.key", "broker/mlxpool.toml", "worker/worker.key", "worker/broker.pub",
        "gateway/gateway.key", "gateway/broker.pub", "gateway/http.keys", "app/app.key",
        "app/broker.pub",
    }  # fmt: skip
    modes = {stat.S_IMODE(path.stat().st_mode) for path in keys.rglob("*") if path.is_file()}
    assert modes == {0o600}
    allowed = tomllib.loads((keys / "broker" / "mlxpool.toml").read_text())["keys"]
    roles = {name: key["role"] for name, key in allowed.items()}
    assert roles == {"worker": "worker", "gateway": "client", "app": "client"}


def test_a_second_start_changes_nothing(keys: Path) -> None:
    before = contents(keys)
    done = make_keys(keys)
    assert done.returncode == 0 and "already" in done.stdout
    assert contents(keys) == before


def test_a_start_that_was_interrupted_is_made_up_for(keys: Path) -> None:
    (keys / "broker" / "mlxpool.toml").rename(keys / "broker" / "mlxpool.part")
    assert make_keys(keys).returncode == 0
    assert len(contents(keys)) == 9


def test_a_request_over_http_and_one_over_zeromq(keys: Path, tmp_path: Path) -> None:
    ports = ports_of_deployments()

    def here(text: str, service: str) -> str:
        """Returns a word of the compose file with its ports, hosts and folders made local."""
        if text in ports:
            return ports[text]
        for port, free in ports.items():
            text = text.replace(f":{port}", f":{free}")
        text = text.replace("0.0.0.0", "127.0.0.1").replace("tcp://broker:", "tcp://127.0.0.1:")
        text = text.replace("/var/lib/mlxpool/", f"{tmp_path}/state/")
        return text.replace("/keys/", f"{keys}/{service}/")

    def service(name: str) -> Any:
        words = [here(word, name) for word in SERVICES[name]["command"]]
        given = SERVICES[name].get("environment", {})
        variables = {key: here(value, name) for key, value in given.items()}
        return running(words, tmp_path / f"{name}.log", variables=variables)

    config = keys / "broker" / "mlxpool.toml"
    config.write_text(here(config.read_text(), "broker"))
    url = f"http://127.0.0.1:{ports['11434']}"
    with service("broker"):
        until(lambda: answers(f"http://127.0.0.1:{ports['9464']}/healthz"), "the broker is up")
        with service("worker"), service("gateway"):
            until(lambda: answers(f"{url}/health"), "the gateway is healthy")
            bearer = (keys / "gateway" / "http.keys").read_text().strip()
            answer = httpx.post(
                f"{url}/v1/completions",
                json={"model": "demo", "prompt": "def", "max_tokens": 4, "ignore_eos": True},
                headers={"authorization": f"Bearer {bearer}"},
                timeout=PATIENCE,
            )
            assert answer.json()["choices"][0]["finish_reason"] == "length"
            with Client(
                endpoint=f"tcp://127.0.0.1:{ports['7200']}",
                server_key=str(keys / "app" / "broker.pub"),
                key=str(keys / "app" / "app.key"),
                connect_timeout=PATIENCE,
            ) as client:
                result = client.generate("demo", "def", max_tokens=4, ignore_eos=True, seed=7)
                assert result.reason == "length"
                job = client.submit("demo", "def", max_tokens=4, ignore_eos=True, seed=7)
                assert client.fetch(job).read().ids == result.ids

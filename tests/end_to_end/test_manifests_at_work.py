"""Runs the settings and arguments of deploy/k8s as processes of this machine."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import httpx
import pytest
import yaml

from support.deployment import MLXPOOL, answers, free_ports, running
from support.pool import PATIENCE, until

BASE = Path(__file__).parents[2] / "deploy" / "k8s" / "base"
BEARER = "a-key-of-more-than-16-characters"


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    """The public keys by name; writes the key files that the Secrets hold."""
    made = {}
    for name, role in (
        ("broker", "server"), ("worker", "worker"), ("gateway", "client"), ("app", "client"),
    ):  # fmt: skip
        flags = ("keygen", name, "--role", role, "--folder", str(tmp_path / "keys"), "--json")
        done = subprocess.run([*MLXPOOL, *flags], capture_output=True, timeout=PATIENCE, check=True)
        made[name] = str(json.loads(done.stdout)["public"])
    (tmp_path / "keys" / "broker.pub").write_text(made["broker"])
    (tmp_path / "keys" / "http.keys").write_text(BEARER)
    return made


def arguments(manifest: str) -> list[str]:
    """The arguments of a workload's container."""
    (workload,) = yaml.safe_load_all((BASE / manifest).read_text("utf-8"))
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    return list(container["args"])


def here(text: str, folder: Path, ports: dict[str, str]) -> str:
    """The text with the cluster's names and paths replaced by those of this machine."""
    if text in ports:
        return ports[text]
    for port, free in ports.items():
        text = text.replace(f":{port}", f":{free}")
    for name in ("0.0.0.0", "mlxpool-back"):
        text = text.replace(name, "127.0.0.1")
    text = text.replace("tcp://mlxpool:", "tcp://127.0.0.1:")
    return text.replace("/keys/", f"{folder}/keys/").replace("/etc/mlxpool/", f"{folder}/")


def test_requests_pass_through_gateway_broker_and_worker(
    tmp_path: Path, keys: dict[str, str]
) -> None:
    ports = free_ports()
    settings = here((BASE / "mlxpool.toml").read_text("utf-8"), tmp_path, ports)
    for name, role in (("worker", "worker"), ("gateway", "client"), ("app", "client")):
        settings += f'\n[keys.{name}]\nrole = "{role}"\npublic = "{keys[name]}"\n'
    (tmp_path / "mlxpool.toml").write_text(settings)
    broker, worker, gateway = (
        [here(word, tmp_path, ports) for word in arguments(manifest)]
        for manifest in ("broker.yaml", "worker-demo.yaml", "gateway.yaml")
    )
    asked = [
        *("run", "demo", "def", "--max-tokens", "4", "--json"),
        *("--endpoint", f"tcp://127.0.0.1:{ports['7200']}"),
        *("--key", str(tmp_path / "keys" / "app.key"), "--server-key", keys["broker"]),
    ]
    url = f"http://127.0.0.1:{ports['11434']}"
    with running(broker, tmp_path / "broker.log"):
        until(lambda: answers(f"http://127.0.0.1:{ports['9464']}/readyz"), "the broker is ready")
        with (
            running(worker, tmp_path / "worker.log"),
            running(gateway, tmp_path / "gateway.log"),
        ):
            done = subprocess.run(
                [*MLXPOOL, *asked], capture_output=True, text=True, timeout=PATIENCE
            )
            assert done.returncode == 0, done.stderr
            assert json.loads(done.stdout.splitlines()[-1])["reason"] == "length"
            until(lambda: answers(f"{url}/health"), "the gateway is ready")
            body = {"model": "demo", "prompt": "def", "max_tokens": 4}
            assert httpx.post(f"{url}/v1/completions", json=body).status_code == 401
            bearer = {"authorization": f"Bearer {BEARER}"}
            answer = httpx.post(
                f"{url}/v1/completions", json=body, headers=bearer, timeout=PATIENCE
            )
            assert answer.json()["choices"][0]["finish_reason"] == "length"

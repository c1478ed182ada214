"""Runs the settings and arguments of deploy/k8s as processes of this machine."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import httpx

from support.deployment import (
    MLXPOOL,
    admitting,
    answers,
    arguments,
    make_keys,
    ports_of_deployments,
    running,
)
from support.pool import PATIENCE, until

BASE = Path(__file__).parents[2] / "deploy" / "k8s" / "base"
BEARER = "a-key-of-more-than-16-characters"


ROLES = {"broker": "server", "worker": "worker", "gateway": "client", "app": "client"}


def here(text: str, folder: Path, ports: dict[str, str]) -> str:
    """Returns the text with the cluster's names and paths replaced by those of this machine."""
    if text in ports:
        return ports[text]
    for port, free in ports.items():
        text = text.replace(f":{port}", f":{free}")
    for name in ("0.0.0.0", "mlxpool-back"):
        text = text.replace(name, "127.0.0.1")
    text = text.replace("tcp://mlxpool:", "tcp://127.0.0.1:")
    return text.replace("/keys/", f"{folder}/keys/").replace("/etc/mlxpool/", f"{folder}/")


def test_requests_pass_through_gateway_broker_and_worker(
    tmp_path: Path,
) -> None:
    ports = ports_of_deployments()
    keys = make_keys(tmp_path / "keys", ROLES, BEARER)
    settings = here((BASE / "mlxpool.toml").read_text("utf-8"), tmp_path, ports)
    settings = admitting(settings, ROLES, keys)
    (tmp_path / "mlxpool.toml").write_text(settings)
    broker, worker, gateway = (
        [here(word, tmp_path, ports) for word in arguments(BASE / manifest)]
        for manifest in ("broker.yaml", "worker-demo.yaml", "gateway.yaml")
    )
    asked = [
        *("run", "demo", "def", "--max-tokens", "4", "--ignore-eos", "--json"),
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
            body = {"model": "demo", "prompt": "def", "max_tokens": 4, "ignore_eos": True}
            assert (
                httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE).status_code == 401
            )
            bearer = {"authorization": f"Bearer {BEARER}"}
            answer = httpx.post(
                f"{url}/v1/completions", json=body, headers=bearer, timeout=PATIENCE
            )
            assert answer.json()["choices"][0]["finish_reason"] == "length"

"""Runs the manifests of two pools and a gateway in network namespaces, under their NetworkPolicies.

Each pod's command runs in its own namespace, with the names of the services and the ports that the
policies open. The tests need root, `ip` and `nft`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.deployment import MLXPOOL, admitting, arguments, make_keys, running
from support.network_policies import Allowed, PodPlace, allowed
from support.pod_network import PodNetwork
from support.pool import PATIENCE, until

K8S = Path(__file__).parents[2] / "deploy" / "k8s"
BASE, POOLS = K8S / "base", K8S / "overlays" / "pools"
ROLES = {
    "broker": "server", "broker-2": "server",
    "worker": "worker", "gateway": "client", "app": "client",
}  # fmt: skip
BEARER = "a-key-of-more-than-16-characters"
SERVICES = {
    "worker": {"mlxpool-back": "broker"},
    "worker-2": {"mlxpool-back": "broker-2"},
    "gateway": {"mlxpool": "broker", "mlxpool.mlxpool-2.svc": "broker-2"},
    "program": {"mlxpool-http.mlxpool.svc": "gateway", "mlxpool.mlxpool.svc": "broker"},
    "prometheus": {"pool": "broker", "pool-2": "broker-2"},
}
OPEN = {
    *(Allowed(worker, broker, 7201)
      for worker, broker in (("worker", "broker"), ("worker-2", "broker-2"))),
    *(Allowed(client, broker, 7200)
      for client in ("gateway", "program") for broker in ("broker", "broker-2")),
    *(Allowed("prometheus", broker, 9464) for broker in ("broker", "broker-2")),
    Allowed("program", "gateway", 11434), Allowed("prometheus", "gateway", 11434),
}  # fmt: skip
WORKLOADS = {  # by pod: its manifest, and the files of its Secret
    "broker": (BASE / "broker.yaml", {"broker.key": "broker.key"}),
    "broker-2": (BASE / "broker.yaml", {"broker.key": "broker-2.key"}),
    "worker": (
        BASE / "worker-demo.yaml",
        {"worker.key": "worker.key", "broker.pub": "broker.pub"},
    ),
    "worker-2": (
        BASE / "worker-demo.yaml",
        {"worker.key": "worker.key", "broker.pub": "broker-2.pub"},
    ),
    "gateway": (
        POOLS / "gateway.yaml",
        {name: name for name in ("gateway.key", "broker.pub", "broker-2.pub", "http.keys")},
    ),
}
SOON = "beat_limit = 2.0\n"  # seconds in place of 10, so that a cut is noticed soon
FETCH = """
import sys, urllib.request
asked = urllib.request.Request(sys.argv[1], data=sys.stdin.buffer.read() or None, headers={
    "authorization": f"Bearer {sys.argv[2]}", "content-type": "application/json"})
print(urllib.request.urlopen(asked, timeout=60).read().decode())
"""


def place(name: str, namespace: str, manifest: Path) -> PodPlace:
    """Returns a pod with this name and namespace, and a workload's labels and ports."""
    (workload,) = yaml.safe_load_all(manifest.read_text("utf-8"))
    template = workload["spec"]["template"]
    (container,) = template["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
    return PodPlace(name, namespace, template["metadata"]["labels"], ports)


PODS = [
    place("broker", "mlxpool", BASE / "broker.yaml"),
    place("worker", "mlxpool", BASE / "worker-demo.yaml"),
    place("gateway", "mlxpool", BASE / "gateway.yaml"),
    place("broker-2", "mlxpool-2", BASE / "broker.yaml"),
    place("worker-2", "mlxpool-2", BASE / "worker-demo.yaml"),
    PodPlace("program", "default", {"mlxpool.dev/client": "true"}, {}),
    PodPlace("prometheus", "monitoring", {}, {}),
    PodPlace("stranger", "default", {}, {}),
]


def here(text: str, folder: Path) -> str:
    """Returns the text with a pod's paths replaced by those in a folder of this machine."""
    return text.replace("/keys/", f"{folder}/keys/").replace("/etc/mlxpool/", f"{folder}/")


def policies() -> Iterator[dict[str, Any]]:
    """Yields the NetworkPolicies of the namespaces `mlxpool` and `mlxpool-2`.

    The second namespace has no policy for a gateway.
    """
    for file, namespace in (
        (BASE / "network.yaml", "mlxpool"),
        (POOLS / "network.yaml", "mlxpool"),
        (BASE / "network.yaml", "mlxpool-2"),
        (POOLS / "second" / "network.yaml", "mlxpool-2"),
    ):
        for document in yaml.safe_load_all(file.read_text("utf-8")):
            document["metadata"]["namespace"] = namespace
            yield document


def test_the_policies_open_these_connections_and_no_others() -> None:
    assert allowed(policies(), PODS) == OPEN


@dataclass(frozen=True, slots=True)
class Deployed:
    """Two running pools and a running gateway."""

    network: PodNetwork
    folder: Path

    def fetch(self, pod: str, url: str, body: dict[str, Any] | None = None) -> str | None:
        """Sends a request from a pod; returns the body of the answer.

        Returns None if the request fails or its status is not 200.
        """
        done = subprocess.run(
            [*self.network.inside(pod), sys.executable, "-c", FETCH, url, BEARER],
            input="" if body is None else json.dumps(body),
            capture_output=True, text=True, timeout=2 * PATIENCE,
        )  # fmt: skip
        return done.stdout if done.returncode == 0 else None

    def ready(self, broker: str) -> bool:
        return self.fetch("prometheus", f"http://{broker}:9464/readyz") is not None

    def total(self, broker: str, series: str) -> float:
        """Returns the sum of a broker's metrics whose lines begin with `series`."""
        metrics = self.fetch("prometheus", f"http://{broker}:9464/metrics")
        assert metrics is not None
        lines = [line for line in metrics.splitlines() if line.startswith(series)]
        assert lines, f"no series {series}"
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def accepted(self, broker: str) -> int:
        stats = self.fetch("prometheus", f"http://{broker}:9464/stats")
        assert stats is not None
        return int(json.loads(stats)["requests"]["accepted"])

    def complete(self) -> None:
        """Sends a completion request from the pod `program` through the gateway, and checks it."""
        body = {"model": "demo", "prompt": "def", "max_tokens": 4, "ignore_eos": True}
        url = "http://mlxpool-http.mlxpool.svc:11434/v1/completions"
        answer = self.fetch("program", url, body)
        assert answer is not None
        assert json.loads(answer)["choices"][0]["finish_reason"] == "length"

    def generate(self) -> subprocess.Popen[str]:
        """Starts a long stream from the pod `program` at the first broker, without the gateway."""
        words = [
            *("run", "demo", "def", "--max-tokens", "600", "--seed", "1", "--json"),
            *("--endpoint", "tcp://mlxpool.mlxpool.svc:7200"),
            *("--key", f"{self.folder}/keys/app.key"),
            *("--server-key", f"{self.folder}/keys/broker.pub"),
        ]
        return subprocess.Popen(
            [*self.network.inside("program"), *MLXPOOL, *words], stdout=subprocess.PIPE, text=True
        )


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    folder = tmp_path_factory.mktemp("pods")
    with ExitStack() as stack:
        network = stack.enter_context(PodNetwork((pod.name for pod in PODS), SERVICES))
        network.enforce(allowed(policies(), PODS))
        public = make_keys(folder / "keys", ROLES, BEARER)
        config = (BASE / "mlxpool.toml").read_text("utf-8").replace("[pool]\n", f"[pool]\n{SOON}")
        settings = admitting(config, ROLES, public)
        for pod, (manifest, secret) in WORKLOADS.items():
            keys = folder / pod / "keys"
            keys.mkdir(parents=True)
            for name, file in secret.items():
                shutil.copy(folder / "keys" / file, keys / name)
            (folder / pod / "mlxpool.toml").write_text(here(settings, folder / pod))
            words = [here(word, folder / pod) for word in arguments(manifest)]
            log = folder / f"{pod}.log"
            stack.enter_context(running(words, log, network.inside(pod)))
        deployment = Deployed(network, folder)
        for broker in ("pool", "pool-2"):
            until(partial(deployment.ready, broker), f"{broker} is ready")
        health = "http://mlxpool-http.mlxpool.svc:11434/health"
        until(lambda: deployment.fetch("program", health), "the gateway is ready")
        yield deployment


def test_requests_pass_through_the_gateway_to_both_pools(deployed: Deployed) -> None:
    def both_have_worked() -> bool:
        deployed.complete()
        return all(deployed.accepted(broker) for broker in ("pool", "pool-2"))

    until(both_have_worked, "requests are divided among both pools")


def test_other_connections_are_refused(deployed: Deployed) -> None:
    for source in PODS:
        for target in PODS:
            for port in () if source is target else target.ports.values():
                wanted = Allowed(source.name, target.name, port)
                assert deployed.network.connects(*wanted) == (wanted in OPEN), wanted


def test_a_stream_outlives_the_cut_of_its_workers_link(deployed: Deployed) -> None:
    workers = 'mlxpool_workers{model="demo"'
    with deployed.generate() as whole:
        assert whole.stdout is not None
        expected = json.loads(whole.stdout.read().splitlines()[-1])
    with deployed.generate() as stream:
        assert stream.stdout is not None
        stream.stdout.readline()
        deployed.network.link("worker", "down")
        try:
            until(lambda: deployed.total("pool", workers) == 0, "the worker is given up")
            deployed.complete()  # the worker of the other pool answers
        finally:
            deployed.network.link("worker", "up")
        until(lambda: deployed.total("pool", f'{workers},state="ready"') == 1, "the worker is back")
        ended = json.loads(stream.stdout.read().splitlines()[-1])
    assert stream.returncode == 0
    # On a busy machine the broker may have given up the worker more than once.
    assert deployed.total("pool", 'mlxpool_requests_resumed_total{model="demo"}') >= 1
    assert ended["reason"] == expected["reason"] == "length"
    assert ended["text"] == expected["text"]

"""Network namespaces of Linux as pods, with addresses, service names and a firewall."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest

from mlxpool.common.closing import Closing
from support.network_policies import Allowed
from support.pool import PATIENCE

NAMES = Path("/etc/netns")  # `ip netns exec` gives a process the files of its namespace's folder
PREFIX = "mlxpool-"  # prefix of a namespace's name; the pid of its maker and the pod follow
ADDRESS = "10.77.0.{}"
DIAL = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 10).close()"


class PodNetwork(Closing):
    """A namespace for each pod, and a namespace with a bridge between them.

    Skips the test if namespaces are not allowed, or if a program is missing.
    """

    def __init__(self, pods: Iterable[str], services: Mapping[str, Mapping[str, str]]) -> None:
        """`services` has for each pod the names that it can resolve, with the pod of each name."""
        if os.geteuid() != 0:
            pytest.skip("network namespaces need root")
        lacking = [name for name in ("ip", "nft") if shutil.which(name) is None]
        if lacking:
            pytest.skip(f"missing program: {', '.join(lacking)}, of iproute2 and nftables")
        self._cleanup = ExitStack()
        self._prefix = f"{PREFIX}{os.getpid()}"
        _remove_left()
        self.addresses = {pod: ADDRESS.format(number) for number, pod in enumerate(pods, 2)}
        try:
            self._make_bridge()
            for number, pod in enumerate(self.addresses):
                self._make_pod(pod, number, services.get(pod, {}))
        except BaseException:
            self.close()
            raise

    def space(self, pod: str) -> str:
        """Returns the name of a pod's namespace."""
        return f"{self._prefix}-{pod}"

    def inside(self, pod: str) -> tuple[str, ...]:
        """Returns the beginning of a command that runs in this pod."""
        return "ip", "netns", "exec", self.space(pod)

    def _add(self, pod: str) -> None:
        space = self.space(pod)
        done = subprocess.run(["ip", "netns", "add", space], capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"network namespaces are not allowed here: {done.stderr.strip()}")
        self._cleanup.callback(_run, "ip", "netns", "delete", space)
        _run("ip", "-n", space, "link", "set", "lo", "up")

    def _make_bridge(self) -> None:
        self._add("bridge")
        space = self.space("bridge")
        command = ("ip", "-n", space, "link", "add", "bridge", "type", "bridge")
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"bridges are not allowed here: {done.stderr.strip()}")
        _run("ip", "-n", space, "link", "set", "bridge", "up")

    def _make_pod(self, pod: str, number: int, services: Mapping[str, str]) -> None:
        self._add(pod)
        space, bridge, port = self.space(pod), self.space("bridge"), f"port{number}"
        _run(
            *("ip", "-n", bridge, "link", "add", port, "type", "veth"),
            *("peer", "name", "eth0", "netns", space),
        )
        _run("ip", "-n", bridge, "link", "set", port, "master", "bridge", "up")
        _run("ip", "-n", space, "address", "add", f"{self.addresses[pod]}/24", "dev", "eth0")
        _run("ip", "-n", space, "link", "set", "eth0", "up")
        folder = NAMES / space
        self._cleanup.callback(_forget, folder)
        folder.mkdir(parents=True)
        lines = [f"{self.addresses[meant]} {name}" for name, meant in services.items()]
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))

    def enforce(self, connections: Iterable[Allowed]) -> None:
        """Accepts only these connections between pods; all others are refused immediately."""
        accepted: dict[str, list[str]] = {pod: [] for pod in self.addresses}
        for source, target, port in connections:
            rule = f"ip saddr {self.addresses[source]} tcp dport {port} accept"
            accepted[target].append(rule)
        for pod, rules in accepted.items():
            chain = "type filter hook input priority 0; policy drop;"
            known = "iifname lo accept\nct state established,related accept"
            lines = "\n".join([chain, known, *rules, "meta l4proto tcp reject with tcp reset"])
            table = f"table inet pods {{\nchain input {{\n{lines}\n}}\n}}\n"
            _run(*self.inside(pod), "nft", "-f", "-", given=table)

    def connects(self, pod: str, target: str, port: int) -> bool:
        """Returns whether a pod can connect to a port of another pod."""
        words = (sys.executable, "-c", DIAL, self.addresses[target], str(port))
        done = subprocess.run(
            [*self.inside(pod), *words], capture_output=True, text=True, timeout=PATIENCE
        )
        assert done.returncode == 0 or "ConnectionRefusedError" in done.stderr, done.stderr
        return done.returncode == 0

    def link(self, pod: str, state: str) -> None:
        """Sets a pod's link `up` or `down`."""
        _run("ip", "-n", self.space(pod), "link", "set", "eth0", state)

    def close(self) -> None:
        """Removes the namespaces and their files."""
        self._cleanup.close()


def _run(*words: str, given: str = "") -> None:
    done = subprocess.run(words, input=given, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, (words, done.stderr)


def _remove_left() -> None:
    """Removes the namespaces of killed test processes, and ends the processes in them."""
    listing = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    for space in (line.split()[0] for line in listing.splitlines() if line.startswith(PREFIX)):
        maker = space.removeprefix(PREFIX).partition("-")[0]
        if not maker.isdecimal() or psutil.pid_exists(int(maker)):
            continue
        inside = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True)
        for pid in map(int, inside.stdout.split()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        subprocess.run(["ip", "netns", "delete", space], capture_output=True)
        _forget(NAMES / space)


def _forget(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # other namespaces have files in the folder
        NAMES.rmdir()

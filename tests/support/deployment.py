"""Runs the settings and arguments of deploy/ as processes of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

from support.free_ports import free_ports
from support.pool import PATIENCE
from support.secret_file import secret_file

PORTS = ("7200", "7201", "11434", "9464")
MLXPOOL = (sys.executable, "-m", "mlxpool.cli.main")


def ports_of_deployments() -> dict[str, str]:
    """Returns a free port for each port of the deployments."""
    return {name: str(port) for name, port in zip(PORTS, free_ports(len(PORTS)), strict=True)}


def arguments(manifest: Path) -> list[str]:
    """Returns the arguments of the container in the only workload of a file or patch."""
    (workload,) = yaml.safe_load_all(manifest.read_text("utf-8"))
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    return list(container["args"])


def make_keys(folder: Path, roles: Mapping[str, str], bearer: str) -> dict[str, str]:
    """Writes the key files of the Secrets and the brokers' public keys; returns the public keys."""
    public_keys = {}
    for name, role in roles.items():
        flags = ("keygen", name, "--role", role, "--folder", str(folder), "--json")
        done = subprocess.run([*MLXPOOL, *flags], capture_output=True, timeout=PATIENCE, check=True)
        public_keys[name] = str(json.loads(done.stdout)["public"])
        if role == "server":
            (folder / f"{name}.pub").write_text(public_keys[name])
    secret_file(folder / "http.keys", bearer)
    return public_keys


def admitting(settings: str, roles: Mapping[str, str], public: Mapping[str, str]) -> str:
    """Returns broker settings with a section for each key, except keys of the role `server`."""
    return settings + "".join(
        f'\n[keys.{name}]\nrole = "{role}"\npublic = "{public[name]}"\n'
        for name, role in roles.items()
        if role != "server"
    )


@contextmanager
def running(
    words: Sequence[str],
    log: Path,
    prefix: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> Iterator[None]:
    """Runs `mlxpool` with these arguments in the `with` block, with its own run directory.

    `prefix` is a command that runs `mlxpool`, such as `ip netns exec NAME`. `variables` are set in
    its environment.
    """
    with TemporaryDirectory(prefix="mlxpool-") as folder, log.open("wb") as out:
        environment = {**os.environ, "MLXPOOL_RUN_DIR": f"{folder}/pool", **(variables or {})}
        command = [*prefix, *MLXPOOL, *words]
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
        try:
            yield
        finally:
            process.terminate()
            try:
                assert process.wait(PATIENCE) == 0, log.read_text()
            finally:
                process.kill()
                process.wait()


def answers(url: str) -> bool:
    """Returns whether a request to the URL is answered with status 200."""
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError):
        return False

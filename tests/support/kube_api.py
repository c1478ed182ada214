"""An API server of Kubernetes on the loopback, with its store, but without nodes or controllers."""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from mlxpool.common.closing import Closing
from support.free_ports import free_ports
from support.pool import PATIENCE, until

PROGRAMS = ("kube-apiserver", "etcd", "kubectl")
FOLDERS = "MLXPOOL_KUBE_PATH"  # additional folders with the programs, divided by colons
DEFINITIONS = "MLXPOOL_KUBE_CRDS"  # a folder with definitions of other projects' kinds
TOKEN = "a-token-of-this-test"


class KubeApi(Closing):
    """The API server. Skips the test if a program is missing.

    The environment variable DEFINITIONS names a folder with definitions of further kinds.
    """

    def __init__(self, folder: Path) -> None:
        """`folder` gets the files of the server and of its store."""
        path = os.pathsep.join(filter(None, (os.environ.get(FOLDERS), os.environ.get("PATH"))))
        programs = {name: shutil.which(name, path=path) for name in PROGRAMS}
        lacking = [name for name, program in programs.items() if program is None]
        if lacking:
            pytest.skip(f"no {', '.join(lacking)} on the PATH or in ${FOLDERS}")
        self._kubectl = str(programs["kubectl"])
        self._folder = folder
        store, peers, port = free_ports(3)
        self._url = f"https://127.0.0.1:{port}"
        self._processes: list[subprocess.Popen[bytes]] = []
        key = folder / "sa.key"
        for words in (
            ("genrsa", "-out", key, "2048"),
            ("rsa", "-in", key, "-pubout", "-out", f"{key}.pub"),
        ):
            subprocess.run(["openssl", *map(str, words)], capture_output=True, check=True)
        (folder / "tokens.csv").write_text(f'{TOKEN},admin,admin,"system:masters"\n')
        try:
            self._start(
                str(programs["etcd"]),
                f"--data-dir={folder / 'store'}",
                f"--listen-client-urls=http://127.0.0.1:{store}",
                f"--advertise-client-urls=http://127.0.0.1:{store}",
                f"--listen-peer-urls=http://127.0.0.1:{peers}",
                "--log-level=error",
            )
            self._start(
                str(programs["kube-apiserver"]),
                f"--etcd-servers=http://127.0.0.1:{store}",
                "--bind-address=127.0.0.1",
                "--advertise-address=127.0.0.1",
                f"--secure-port={port}",
                f"--cert-dir={folder / 'certificates'}",
                "--service-account-issuer=https://kubernetes.default.svc",
                f"--service-account-key-file={key}.pub",
                f"--service-account-signing-key-file={key}",
                "--service-cluster-ip-range=10.0.0.0/24",
                "--authorization-mode=RBAC",
                f"--token-auth-file={folder / 'tokens.csv'}",
                # No controller runs here, which would create the service accounts of pods.
                "--disable-admission-plugins=ServiceAccount",
            )
            until(self._ready, "the API server is ready", 2 * PATIENCE)
            self._define()
        except BaseException:
            self.close()
            raise

    def _start(self, *words: str) -> None:
        log = self._folder / f"{Path(words[0]).name}.log"
        with log.open("wb") as out:
            self._processes.append(subprocess.Popen(words, stdout=out, stderr=out))

    def _ready(self) -> bool:
        for process in self._processes:
            logs = {path.name: path.read_text()[-2000:] for path in self._folder.glob("*.log")}
            assert process.poll() is None, logs
        request = urllib.request.Request(
            f"{self._url}/readyz", headers={"authorization": f"Bearer {TOKEN}"}
        )
        unchecked = ssl.create_default_context()
        unchecked.check_hostname, unchecked.verify_mode = False, ssl.CERT_NONE
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE, context=unchecked) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, ConnectionError):
            return False

    def _define(self) -> None:
        """Creates the resource definitions of the folder DEFINITIONS, if that variable is set."""
        folder = os.environ.get(DEFINITIONS)
        if folder is None:
            return
        # `apply` would store a copy in an annotation, and some definitions are too large for that.
        self.checked("create", "-f", folder)
        self.checked("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")

    def kubectl(self, *words: str, given: str = "") -> subprocess.CompletedProcess[str]:
        """Runs kubectl against the server; `given` is its standard input."""
        access = ("--server", self._url, "--token", TOKEN, "--insecure-skip-tls-verify")
        return subprocess.run(
            [self._kubectl, "--kubeconfig=/dev/null", *access, *words],
            input=given,
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE,
        )

    def checked(self, *words: str, given: str = "") -> str:
        """Runs a kubectl command that must succeed; returns its output."""
        done = self.kubectl(*words, given=given)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def kinds(self) -> set[str]:
        """Returns the kinds that the server knows."""
        table = self.checked("api-resources", "--no-headers")
        return {line.split()[-1] for line in table.splitlines()}

    def close(self) -> None:
        """Ends the processes, the store last."""
        for process in reversed(self._processes):
            process.terminate()
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

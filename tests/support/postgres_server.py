"""A PostgreSQL server for a test, on a Unix socket."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest

from mlxpool.common.closing import Closing
from support.pool import PATIENCE, until

DEBIAN = Path("/usr/lib/postgresql")  # has a folder for each major version
USER = "mlxpool"
NOBODY = 65534  # the server refuses to run as root
MEMORY = Path("/dev/shm")  # a folder in memory, where fsync takes no time
ROOM = 1 << 30  # bytes; a cluster needs about 60 MB
SETTINGS = {
    "listen_addresses": "",
    "fsync": "on",
    "shared_buffers": "16MB",
    "max_connections": "20",
    "autovacuum": "off",
}


def _programs() -> Path | None:
    """Returns the folder of the newest installed `postgres` and `initdb`."""
    versions = sorted(DEBIAN.glob("*/bin/postgres"), key=lambda path: float(path.parts[-3]))
    if versions:
        return versions[-1].parent
    program = shutil.which("postgres")
    return None if program is None else Path(program).parent


def _has_room(folder: Path) -> bool:
    return os.access(folder, os.W_OK) and shutil.disk_usage(folder).free > ROOM


class PostgresServer(Closing):
    """A PostgreSQL server with its data in a new folder, in memory or below /tmp.

    As root it runs as an unprivileged user, who owns the folder. Skips the test if the programs are
    not installed.
    """

    def __init__(self, **settings: str) -> None:
        programs = _programs()
        if programs is None:
            pytest.skip("missing programs: postgres and initdb, of Debian's package postgresql")
        self._prefix: list[str] = []
        if os.geteuid() == 0:
            if shutil.which("setpriv") is None:
                pytest.skip("missing program: setpriv, for PostgreSQL does not run as root")
            ids = (f"--reuid={NOBODY}", f"--regid={NOBODY}")
            self._prefix = ["setpriv", *ids, "--clear-groups"]
        place = MEMORY if _has_room(MEMORY) else Path("/tmp")
        self.folder = Path(tempfile.mkdtemp(prefix="mlxpool-pg-", dir=place))
        self._programs = programs
        self._schemas = itertools.count(1)
        self.process: subprocess.Popen[bytes] | None = None
        self._settings = {**SETTINGS, **settings}
        try:
            if self._prefix:
                os.chown(self.folder, NOBODY, NOBODY)
            self._run("initdb", "-D", "data", "-U", USER, "-A", "trust", "-E", "UTF8",
                      "--no-locale", "--no-sync")  # fmt: skip
            self.start()
        except BaseException:
            self.close()
            raise

    def _run(self, program: str, *flags: str) -> None:
        command = [*self._prefix, str(self._programs / program), *flags]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, timeout=PATIENCE)
        assert done.returncode == 0, done.stderr.decode()

    def start(self) -> None:
        """Starts the server and waits until it answers."""
        flags = [
            flag for name, value in self._settings.items() for flag in ("-c", f"{name}={value}")
        ]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [*self._prefix, str(self._programs / "postgres"), "-D", "data", "-k",
                 str(self.folder), *flags],
                cwd=self.folder,
                stdout=log,
                stderr=log,
            )  # fmt: skip
        until(self._answers, "PostgreSQL answers")

    def _answers(self) -> bool:
        import psycopg

        assert self.process is not None
        assert self.process.poll() is None, (self.folder / "log").read_text()
        try:
            psycopg.connect(self.url("public")).close()
        except psycopg.OperationalError:
            return False
        return True

    def kill(self) -> None:
        """Kills the server as a loss of power does, without ending transactions."""
        assert self.process is not None
        self.process.send_signal(signal.SIGQUIT)  # `immediate` shutdown, children too
        self.process.wait(PATIENCE)

    def end_sessions(self) -> None:
        """Ends every session of a broker, as an administrator can."""
        import psycopg

        with psycopg.connect(self.url("public"), autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE application_name = 'mlxpool'"
            )

    def url(self, schema: str) -> str:
        """Returns the URL of this server's database, whose sessions use the tables of `schema`."""
        options = f"-csearch_path%3D{schema}"
        return f"postgresql://{USER}@/postgres?host={self.folder}&options={options}"

    def new_url(self) -> str:
        """Makes an empty schema; returns its URL."""
        import psycopg

        schema = f"test_{next(self._schemas)}"
        with psycopg.connect(self.url("public")) as connection:
            connection.execute(f"CREATE SCHEMA {schema}".encode())
        return self.url(schema)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

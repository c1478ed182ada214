"""The gateway as a child process, and its listening sockets.

The broker owns the sockets. So it detects an unusable address at its own start, and connections
wait while a new gateway replaces an old gateway.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import time

from mlxpool.broker import host
from mlxpool.broker.processes.records import ProcessRecords
from mlxpool.broker.workers.exit_causes import cause_of
from mlxpool.common import http_access
from mlxpool.common.closing import Closing
from mlxpool.common.config.bounds import host_port
from mlxpool.common.config.schema import GATEWAY_VARIABLE, GatewayConfig, PoolConfig
from mlxpool.common.transport import listening

RECORD = "gateway"
# Seconds for which an earlier broker's gateway may still use the address. The gateway stops
# listening once its broker has ended.
EARLIER_GATEWAY_TIME = 2.0
RETRY_INTERVAL = 0.02  # seconds
BEATS = 4  # heartbeats in `beat_limit`
MAX_BEATS = 4096  # most bytes per read


class GatewayProcess(Closing):
    """The gateway's sockets, which listen from their construction on, and its process.

    At most one process runs at a time. One thread uses it.
    """

    def __init__(self, config: PoolConfig) -> None:
        """Raises ValueError if the keys are unusable, and OSError if the address is unusable."""
        if config.http_keys is not None:
            http_access.read_keys(config.http_keys)
        self._records = ProcessRecords(config.run_dir / "gateway")
        self._bound = _listen(config.http, self._records)
        self.url = listening.url_of(self._bound[0])
        self._process: subprocess.Popen[bytes] | None = None
        self._notified = -1  # the broker's end of the process's pipe

    @property
    def pid(self) -> int | None:
        """The pid of the process; None if no process runs."""
        return None if self._process is None else self._process.pid

    @property
    def resident_bytes(self) -> int:
        return 0 if self._process is None else host.resident_bytes(self._process.pid)

    @property
    def _descriptors(self) -> list[int]:
        return [listener.fileno() for listener in self._bound]

    def start(self, config: PoolConfig) -> int:
        """Starts the process. Raises OSError if it cannot be started.

        Returns a descriptor that becomes readable after a heartbeat, and after the end of the
        process.
        """
        assert self._process is None
        self._notified, held_by_child = os.pipe()
        os.set_blocking(self._notified, False)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "mlxpool.gateway"],
                stdin=subprocess.PIPE,
                stdout=sys.stderr.fileno(),
                env=self._environment(config, held_by_child),
                pass_fds=(*self._descriptors, held_by_child),
                start_new_session=True,
            )
        except OSError:
            os.close(self._notified)
            raise
        finally:
            os.close(held_by_child)
        self._records.add(RECORD, self._process.pid)
        return self._notified

    def record(self) -> None:
        """Rewrites the file that records the running process, because it was removed."""
        if self._process is not None:
            self._records.add(RECORD, self._process.pid)

    def _environment(self, config: PoolConfig, notify_fd: int) -> dict[str, str]:
        host, port = self._bound[0].getsockname()[:2]
        settings = GatewayConfig(
            str(config.run_dir),
            self._descriptors,
            notify_fd,
            host,
            port,
            keys=str(config.http_keys or ""),
            per_key=config.http_per_key,
            max_body=config.http_max_body,
            idle_time=config.http_idle_time,
            stream_keep=config.http_stream_keep,
            drain_timeout=config.http_drain_timeout,
            cors_origins=config.http_cors_origins,
            trusted_proxies=config.http_trusted_proxies,
            access_log=config.http_access_log,
            beat_interval=config.beat_limit / BEATS,
            log_format=config.log_format,
            log_level=config.log_level,
        )
        return {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            GATEWAY_VARIABLE: settings.to_environment(),
        }

    def beats(self) -> int | None:
        """Returns the number of heartbeats since the last call; None if the process has ended."""
        try:
            return len(os.read(self._notified, MAX_BEATS)) or None
        except BlockingIOError:
            return 0

    def signal(self, number: int) -> None:
        """Sends a signal to the process, if it runs."""
        # Only `reap` waits for the process, so until then no other process can have its pid.
        if self._process is not None:
            os.kill(self._process.pid, number)

    def stop_listening(self) -> None:
        """Closes the broker's sockets.

        Connections are refused once the process closes its sockets too.
        """
        for listener in self._bound:
            listener.close()

    def reap(self) -> str:
        """Collects the ended process. Returns the cause of its end in words."""
        assert self._process is not None
        code = self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        os.close(self._notified)
        self._process, self._notified = None, -1
        self._records.remove(RECORD)
        return cause_of(code)

    def close(self) -> None:
        """Kills the process, if it runs, and frees the address."""
        if self._process is not None:
            self.signal(signal.SIGKILL)
            self.reap()
        self.stop_listening()


def _listen(address: str, records: ProcessRecords) -> list[socket.socket]:
    """Listens on an address. Kills an earlier broker's gateway that still listens there."""
    host, port = host_port(address, "pool.http")
    give_up_at = time.monotonic() + EARLIER_GATEWAY_TIME
    waits = True
    while True:
        try:
            return listening.listen(host, port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and waits:
                # One more try follows the end of the last process, which may have ended just now.
                waits = records.any_alive()
                if waits and time.monotonic() >= give_up_at:
                    records.kill_survivors()
                time.sleep(RETRY_INTERVAL)
                continue
            raise OSError(
                error.errno,
                f"pool.http: cannot listen on {address}: {error.strerror}; give another address"
                " with --http HOST:PORT, or port 0 for a free one",
            ) from None

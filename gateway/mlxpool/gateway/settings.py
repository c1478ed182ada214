"""The settings of a gateway."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from mlxpool.common.config.bounds import LOOPBACK, origin_faults, proxy_faults
from mlxpool.common.paths import default_run_dir
from mlxpool.common.transport import sockets


class Broker(Struct, frozen=True):
    """The address of a broker."""

    endpoint: str
    server_key: str | None = None  # the broker's public key, or the path of a file with the key


class Settings(Struct, frozen=True):
    """The settings of the gateway.

    Raises ValueError for a value out of bounds. Raises it also if there are no keys, and `host` is
    not a loopback address.
    """

    run_dir: Path | None = None  # run folder of the broker
    remote: tuple[Broker, ...] = ()  # the brokers of one or several pools, instead of `run_dir`
    key: str | None = None  # the file of the gateway's own key
    host: str = "127.0.0.1"
    port: int = 11434  # Ollama's port, which its clients expect; 0: any free port
    keys: Path | None = None  # file of bearer keys; None: requests need no key
    name_owners: bool | None = None  # the brokers get the key's owner; None: only over ipc
    max_body: int = 8 * 2**20  # most bytes of a request body
    max_connections: int | None = None  # most open connections; None: as RLIMIT_NOFILE allows
    # Seconds that a connection may be idle, longer than clients keep it: nginx and AWS's balancers
    # 60, Go's and Rust's clients 90. A client that sends just before the gateway closes the
    # connection gets a reset.
    idle_time: float = 120.0
    header_time: float = 10.0  # seconds until the headers of a request must have arrived
    body_time: float = 30.0  # seconds until the whole request body must have arrived
    keep_alive: float = 10.0  # seconds without output before a stream sends a keep-alive comment
    deadline: float | None = None  # seconds for a request; None: the pool's own deadline
    per_key: int | None = None  # most requests in flight of a key (without keys: of all)
    stream_keep: float = 600.0  # seconds that an answer with an Idempotency-Key is kept
    broker_grace: float = 10.0  # seconds without the broker before a request is answered 503
    drain_timeout: float = 30.0  # seconds that running requests have after SIGTERM
    cors_origins: tuple[str, ...] = ()  # origins whose pages may use the gateway; "*": all
    trusted_proxies: tuple[str, ...] = ()  # proxies whose X-Forwarded-For is read
    access_log: bool = True  # whether each request gets a log line

    @property
    def brokers(self) -> tuple[Broker, ...]:
        """The brokers of the pools, at least one."""
        return self.remote or (Broker(sockets.ipc(self.run_dir or default_run_dir(), "front")),)

    @property
    def names_owners(self) -> bool:
        """Whether the gateway names the owner of each request's API key to the brokers."""
        if self.name_owners is None:
            local = all(broker.endpoint.startswith("ipc://") for broker in self.brokers)
            return self.keys is not None and local
        return self.name_owners

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port is {self.port}, must be from 0 to 65535")
        if self.keys is None and self.host not in LOOPBACK:
            raise ValueError(
                f"host {self.host!r} is open to others: give the file of accepted keys with"
                " --keys FILE"
            )
        if self.name_owners and self.keys is None:
            raise ValueError("name_owners needs keys: give --keys FILE")
        for name in (
            "max_body", "max_connections", "idle_time", "header_time", "body_time", "keep_alive",
            "deadline", "per_key", "broker_grace", "stream_keep",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not 0 < value < 1e9:
                raise ValueError(f"{name} is {value}, must be above 0 and below 1e9")
        if not 0 <= self.drain_timeout < 1e9:
            raise ValueError(f"drain_timeout is {self.drain_timeout}, must be 0 to 1e9 seconds")
        for fault in (*origin_faults(self.cors_origins), *proxy_faults(self.trusted_proxies)):
            raise ValueError(fault)

"""A gateway in a thread of the test process, on a free port of the loopback interface."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

from mlxpool.common.closing import Closing
from mlxpool.common.transport import listening
from mlxpool.gateway.app import Gateway
from mlxpool.gateway.server import listen, make_server
from mlxpool.gateway.settings import Settings
from support.pool import PATIENCE, until


class GatewayThread(Closing):
    """A gateway that serves from its construction until it is closed."""

    def __init__(self, run_dir: Path, **settings: Any) -> None:
        settings_ = Settings(run_dir=run_dir, port=0, **settings)
        self.gateway = Gateway(settings_)
        self._bound = listen(settings_)
        self._server = make_server(self.gateway)
        self._thread = threading.Thread(target=self._server.run, args=(self._bound,))
        self._thread.start()
        until(lambda: self._server.started, "the gateway answers")

    @property
    def url(self) -> str:
        return listening.url_of(self._bound[0])

    def drain(self) -> None:
        """Starts the gateway's drain, as SIGTERM does."""
        self._server.handle_exit(signal.SIGTERM, None)

    @property
    def open_connections(self) -> int:
        return len(self._server.server_state.connections)

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(PATIENCE)
        for socket_ in self._bound:
            socket_.close()
        assert not self._thread.is_alive(), "the gateway did not end"

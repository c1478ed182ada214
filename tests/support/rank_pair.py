"""Two ranks of a group on the CPU: this process is rank 0, a child is rank 1.

`python -m support.rank_pair` runs the child, which serves one model after the other.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from mlxpool.common.closing import Closing
from mlxpool.worker.compute.follower import Follower
from mlxpool.worker.compute.progress import Progress
from mlxpool.worker.engine.model_engine import ModelEngine
from mlxpool.worker.engine.settings import EngineSettings
from mlxpool.worker.groups.collectives import Collectives
from mlxpool.worker.groups.divisions import part_of
from mlxpool.worker.groups.group_engine import open_group_engine
from mlxpool.worker.groups.links import Meeting
from mlxpool.worker.groups.part_layers import PartLayerBuilder
from mlxpool.worker.groups.pipes import Inbox, Orders
from mlxpool.worker.weights.inspect import inspect
from mlxpool.worker.weights.load import LoadedModel, load
from support.free_ports import free_ports
from support.model_engines import model_engine
from support.peer_ranks import peer_sums

RANKS = 2
BY_KERNELS = "by-kernels"  # the argument of a child whose sums use kernels
END = bytes(4)  # a message of length 0: the model is not needed any more
SETTINGS: dict[str, Any] = {
    "context": 128,
    "max_sequences": 3,
    "limit": 2**36,  # a fixed number: the test process's memory grows with other tests
    "prefix_bytes": 2**20,
}


def load_rank(folder: Path, rank: int, collectives: Collectives) -> LoadedModel:
    """Returns a rank's part of a model."""
    part = part_of(inspect(folder), rank, RANKS)
    builder = partial(PartLayerBuilder, part, collectives)
    return load(part.folder, cuts=part.cuts, make_builder=builder)


class RankPair(Closing):
    """Rank 0, with a child process that is rank 1. A process can only have one RankPair."""

    def __init__(self, *, by_kernels: bool = False) -> None:
        """`by_kernels`: simulated kernels (peer_ranks.peer_sums) compute the sums, not a ring.

        `kernels` has the names of the kernels that ran in this process.
        """
        self.kernels: set[str] = set()
        self._peers = ExitStack()
        reader, self._writer = os.pipe()
        with tempfile.TemporaryFile() as hosts:
            ports = free_ports(RANKS)
            hosts.write(json.dumps([[f"127.0.0.1:{port}"] for port in ports]).encode())
            hosts.flush()
            self._child = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "support.rank_pair",
                    str(hosts.fileno()),
                    str(reader),
                    *([BY_KERNELS] if by_kernels else []),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                pass_fds=(hosts.fileno(), reader),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
            os.close(reader)
            assert self._child.stdout is not None
            self._child.stdout.readline()  # the child is about to join
            self.collectives = Collectives.join(Meeting.of(0, RANKS, hosts.fileno(), 0))
        if by_kernels:
            self.kernels = self._peers.enter_context(peer_sums(self.collectives))

    @contextmanager
    def engine(self, folder: Path, **settings: Any) -> Iterator[ModelEngine]:
        """Opens the engine of a model on both ranks."""
        print(folder, file=self._child.stdin, flush=True)
        loaded = load_rank(folder, 0, self.collectives)
        group_engine = open_group_engine(
            loaded,
            None,
            EngineSettings(**{**SETTINGS, **settings}),
            orders=Orders([self._writer]),
            collectives=self.collectives,
        )
        try:
            yield group_engine
        finally:
            group_engine.close()
            os.write(self._writer, END)

    def close(self) -> None:
        """Ends the child process."""
        self._peers.close()
        os.close(self._writer)
        self._child.communicate()


def single(folder: Path, **settings: Any) -> ModelEngine:
    """Returns the engine of the whole model on a single device."""
    return model_engine(load(inspect(folder)), None, **{**SETTINGS, **settings})


def _serve(hosts: int, reader: int, *, by_kernels: bool) -> None:
    print("ready", flush=True)
    collectives = Collectives.join(Meeting.of(1, RANKS, hosts, 0))
    with peer_sums(collectives) if by_kernels else nullcontext():
        _serve_models(collectives, Inbox(reader))


def _serve_models(collectives: Collectives, inbox: Inbox) -> None:
    for line in sys.stdin:
        loaded = load_rank(Path(line.rstrip("\n")), 1, collectives)
        follower = Follower(loaded, collectives, Progress(lambda: None))
        while (message := inbox.take()) is not None:
            follower.handle(message)
        del follower, loaded


if __name__ == "__main__":
    _serve(int(sys.argv[1]), int(sys.argv[2]), by_kernels=sys.argv[3:] == [BY_KERNELS])

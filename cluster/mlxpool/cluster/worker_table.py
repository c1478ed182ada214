"""The workers that a pool's broker host has started, and their public keys, in a file.

The broker reads the keys as sections of its settings. A worker is restarted if its node or its
process was lost; it then has a new key under its old id. The old key is revoked. If the node was
only cut off, its worker can therefore not come back beside the new worker.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from mlxpool.common.records import as_map
from mlxpool.common.transport import keys

FILE = "workers.json"
KEY_PREFIX = "ray-"  # prefix of the names of workers' keys


class WorkerRecord(Struct, frozen=True):
    """A worker. Until it is admitted, `public` is empty, and `node` is its preferred node."""

    id: str
    model: str
    fingerprint: str
    public: str = ""
    node: str = ""


class WorkerTable:
    """The table of workers, read from its folder and written at each change.

    One thread at a time may use it.
    """

    def __init__(self, folder: Path) -> None:
        """Raises OSError and ValueError for a file that cannot be read."""
        self._path = folder / FILE
        self._last = 0
        self.by_id: dict[str, WorkerRecord] = {}
        if self._path.exists():
            table = json.loads(self._path.read_text("utf-8"))
            self._last = int(table["last"])
            self.by_id = {row["id"]: WorkerRecord(**row) for row in table["workers"]}

    def add(self, model: str, fingerprint: str) -> WorkerRecord:
        """Adds a worker, with an id that no other worker has had."""
        self._last += 1
        record = WorkerRecord(f"w{self._last}", model, fingerprint)
        self.by_id[record.id] = record
        self._write()
        return record

    def admit(self, id: str, public: str, node: str) -> None:
        """Sets a worker's key and node. Raises KeyError for an unknown id."""
        self.by_id[id] = replace(self.by_id[id], public=public, node=node)
        self._write()

    def place(self, id: str, fingerprint: str, node: str) -> None:
        """Sets the settings and the preferred node of a worker that starts, and clears its key."""
        self.by_id[id] = replace(self.by_id[id], fingerprint=fingerprint, public="", node=node)
        self._write()

    def remove(self, id: str) -> None:
        if self.by_id.pop(id, None) is not None:
            self._write()

    def sections(self) -> str:
        """Returns the sections of the settings that allow the workers' keys."""
        return "".join(self._sections())

    def _sections(self) -> Iterator[str]:
        for record in self.by_id.values():
            if record.public:
                head = keys.section(f"{KEY_PREFIX}{record.id}")
                yield f'\n{head}\nrole = "worker"\npublic = "{record.public}"\n'

    def _write(self) -> None:
        rows = [as_map(record) for record in self.by_id.values()]
        replace_text(self._path, json.dumps({"last": self._last, "workers": rows}))


def replace_text(path: Path, text: str) -> None:
    """Writes a file atomically: a reader gets the old or the new text, never a part."""
    new = path.with_name(f"{path.name}.new")
    with new.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)

"""Exit codes of a worker of `mlxpool worker`. By them its supervisor decides to start another."""

from __future__ import annotations

STOPPED = 0  # the broker stopped it
ALONE = 69  # no broker answered within `orphan_grace`
AGAIN = 75  # the broker wants a new worker in its place
REFUSED = 77  # its key or its hello was refused

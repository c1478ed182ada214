"""Exit codes of a worker, from which its supervisor, `mlxpool worker`, decides on a restart."""

from __future__ import annotations

STOPPED = 0  # the broker told the worker to stop
ALONE = 69  # no broker answered within `orphan_grace`
AGAIN = 75  # the broker requests another worker to replace this one
REFUSED = 77  # the broker refused the worker's key or its hello

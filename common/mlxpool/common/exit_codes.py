"""Exit codes by which a worker that dialled in tells its supervisor how to go on."""

from __future__ import annotations

STOPPED = 0  # the broker asked it to go
ALONE = 69  # no broker answered for `orphan_grace`
AGAIN = 75  # the broker wants a fresh one in its place
REFUSED = 77  # its key does not let it in, or the broker takes no such worker

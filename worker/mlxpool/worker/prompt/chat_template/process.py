"""`python -m mlxpool.worker.prompt.chat_template.process`: a model's templates at work.

Started by renderer.py.

Its stdin is one end of a pair of sockets; the worker holds the other.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket

from mlxpool.worker.process import lifecycle

NICENESS = 10  # it gives way to the threads that decode
MEMORY = 2**30  # bytes


def main() -> None:
    """Serve until the worker is gone."""
    lifecycle.die_with_parent()
    os.nice(NICENESS)
    with contextlib.suppress(ValueError, OSError):  # macOS has no such bound
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    from mlxpool.worker.prompt.chat_template.render_loop import (
        serve,  # the heavy imports come after
    )

    with socket.socket(fileno=os.dup(lifecycle.STDIN)) as worker:
        serve(worker)


if __name__ == "__main__":
    main()

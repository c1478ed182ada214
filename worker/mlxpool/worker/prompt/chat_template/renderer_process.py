"""`python -m mlxpool.worker.prompt.chat_template.renderer_process`: renders a model's templates.

Started by renderer.py. Its stdin is one end of a socket pair; the worker holds the other.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket

from mlxpool.worker.prompt.chat_template.limits import MAX_RENDERER_MEMORY, RENDERER_NICENESS
from mlxpool.worker.system.parent_death import STDIN, die_with_parent


def main() -> None:
    """Answer requests until the worker closes the connection."""
    die_with_parent()
    os.nice(RENDERER_NICENESS)
    with contextlib.suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (MAX_RENDERER_MEMORY, MAX_RENDERER_MEMORY))
    from mlxpool.worker.prompt.chat_template.render_loop import serve  # imports jinja2

    with socket.socket(fileno=os.dup(STDIN)) as worker:
        serve(worker)


if __name__ == "__main__":
    main()

"""Settings of MLX in the environment; MLX reads them at its first use."""

from __future__ import annotations

import os
import sys

from mlxpool.common.process import private_temp

# MLX ends a CUDA graph at this many megabytes of inputs, including arrays that a kernel writes in
# place. With a pool of many gigabytes every layer would be a separate graph. MLX waits for the
# device if ten graphs are unfinished, so the host would get the tokens of a pass when the next pass
# is nearly done. On an H200, a pass of 1,024 inputs of an 8B model returned to the host after
# 18.7 ms instead of 3.3 ms. The bound of 100 operations a graph stays.
GRAPH_MEGABYTES = 10**9


def set_mlx_environment() -> None:
    """Sets variables that the user has not set, and a private temporary folder, see private_temp.

    Called before MLX is imported; Metal keeps its defaults. Raises OSError if there is no such
    folder.
    """
    private_temp.use()
    if sys.platform == "linux":
        os.environ.setdefault("MLX_MAX_MB_PER_BUFFER", str(GRAPH_MEGABYTES))

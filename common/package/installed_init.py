"""A pool of processes that serves MLX language models over ZeroMQ.

This is `mlxpool/__init__.py` of the wheel. The checkout lacks that file, see build_hook.py.
"""

from mlxpool.common.version import VERSION as __version__

__all__ = ["__version__"]

"""What is set once for every test."""

from __future__ import annotations

import os

from hypothesis import settings

# The gate depends on nobody's luck: each run tries the same cases. `make soak` looks for new ones.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("random", deadline=None, max_examples=1000)
# On a GPU float32 means float32 here; by itself MLX multiplies with 10 bits of fraction there.
os.environ.setdefault("MLX_ENABLE_TF32", "0")
settings.load_profile(os.environ.get("MLXPOOL_HYPOTHESIS", "fixed"))
# Nor on the settings of whoever runs the tests.
os.environ.setdefault("MLXPOOL_CONFIG", os.devnull)

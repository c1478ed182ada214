"""For CUDA: rows and cached prefixes in the blocks of one pool, and compiled passes over rows."""

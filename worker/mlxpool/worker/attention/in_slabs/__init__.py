"""The layout of the CPU: keys and values in slabs of blocks, and passes over rows."""

"""Which sequences run in the next step, and how many KV-cache blocks each may use.

No I/O, no MLX and no clock: the compute thread asks, an engine computes.
"""

"""Which sequences run in the next step, how many KV-cache blocks each may use, memory estimates.

No I/O, no MLX and no clock: the compute thread asks, an engine computes.
"""

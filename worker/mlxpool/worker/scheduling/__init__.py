"""Which sequences run in the next step, with how many KV-cache blocks.

No I/O, no MLX and no clock: the compute thread asks, an engine computes.
"""

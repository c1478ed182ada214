"""Chooses the sequences of the next step, and the number of their KV-cache blocks.

No I/O, no MLX and no clock: the compute thread asks, an engine computes.
"""

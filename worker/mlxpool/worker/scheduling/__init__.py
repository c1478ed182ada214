"""Chooses the sequences of the next step and the numbers of their KV-cache blocks.

No I/O, no MLX and no clock: the compute thread calls it, an engine computes the step.
"""

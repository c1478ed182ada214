"""Chooses the sequences of the next step, and the number of KV-cache blocks that each gets.

No I/O, no MLX and no clock: the compute thread calls it, an engine computes the step.
"""

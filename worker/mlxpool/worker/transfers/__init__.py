"""What a CUDA GPU takes from the host and gives it: the numbers of passes, and weights.

They are in memory that host and device both address, allocated once: see shared_array.py for why.
"""

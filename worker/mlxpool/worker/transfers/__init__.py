"""The numbers that a pass on a CUDA GPU takes from the host and gives it; weights on their way there.

They are in memory that host and device both address, allocated once: see shared_array.py for why.
"""

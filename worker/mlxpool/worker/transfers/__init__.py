"""Numbers of passes and weights, from the host to a CUDA GPU and back.

They are in memory that host and device both address, allocated once, see shared_array.py.
"""

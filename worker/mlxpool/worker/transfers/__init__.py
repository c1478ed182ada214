"""Transfers of numbers (inputs, results, weights) from the host to a CUDA GPU and back.

The numbers are in memory that host and device both address, allocated once, see shared_array.py.
"""

"""Building blocks of models, and their interfaces to the rest of the worker.

A layer knows no architecture and no files; it is described without MLX and built of loaded weights.
"""

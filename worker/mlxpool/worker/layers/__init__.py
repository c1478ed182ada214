"""Building blocks of models, and their interfaces to the rest of the worker.

A layer depends on no architecture and no files. It is described without MLX and built from loaded
weights.
"""

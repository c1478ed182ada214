"""Building blocks of models, and the interfaces between models and the rest of the worker.

A layer knows no architecture and no files; it is described without MLX and built of loaded weights.
"""

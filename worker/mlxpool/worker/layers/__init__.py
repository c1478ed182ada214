"""Layers of models, and their interfaces to the rest of the worker.

A layer depends on no architecture and no files. Descriptions of layers need no MLX; layers are
built from loaded weights.
"""

"""The broker: one process that accepts requests, assigns them to workers and delivers the results.

The broker never imports MLX and never loads a model.
"""

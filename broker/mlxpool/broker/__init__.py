"""The broker: one process that accepts requests, gives them to workers and delivers the results.

It never imports MLX and never sees a model.
"""

"""The measurements of `mlxpool bench`: engine, end to end, mixed load, broker and prefix cache.

Each measures in rounds in which we and peers take turns, and yields tables with ratios.
"""

"""The measurements of `mlxpool bench`: engine, end to end, broker and prefix cache, with peers.

Each measures in rounds in which we and the peers take turns, and yields tables with ratios.
"""

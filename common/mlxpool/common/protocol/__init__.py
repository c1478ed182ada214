"""MLXP/1: the messages between clients, broker and workers, and their encoding.

The modules of this package do no I/O.
"""

"""Layouts of keys, values and states in memory, and attention over them.

An engine has one layout: rows with arrays of their own, slabs (CPU) or a block pool (CUDA). A block
has KV_BLOCK_TOKENS tokens in all of them, see scheduling/kv_blocks.py.
"""

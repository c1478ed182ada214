"""Layouts of keys, values and states in memory, and attention over them.

An engine has one layout, see layout.py: rows with arrays of their own, slabs (CPU, in_slabs/) or a
block pool (CUDA, in_pool/). A block has KV_BLOCK_TOKENS tokens in all of them, see
scheduling/kv_blocks.py.
"""

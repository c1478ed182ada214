"""Layouts of keys, values and states in memory, and attention over these.

A row is the memory of one sequence for its keys, values and states. A line is one token of a pass,
or padding.

An engine has one layout, see layout.py: rows with their own arrays, slabs (CPU, in_slabs/) or a
block pool (CUDA, in_pool/). In every layout a block has KV_BLOCK_TOKENS tokens, see
scheduling/kv_blocks.py.
"""

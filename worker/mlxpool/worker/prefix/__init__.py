"""The prefix cache: keys, values and states of earlier prompts.

A radix tree over token ids says what is cached; a store keeps it. shared_blocks.py is the store of
block pools; that of other rows, attention/row_copies.py, copies arrays. Pure.
"""

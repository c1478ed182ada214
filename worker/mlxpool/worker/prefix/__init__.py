"""The prefix cache: keys, values and states of earlier prompts.

A radix tree over token ids is the index; a store keeps the contents. shared_blocks.py is the store
for block pools. attention/row_copies.py is the store for all other KV rows; it copies arrays. Pure.
"""

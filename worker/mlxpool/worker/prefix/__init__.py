"""The prefix cache: keys, values and states of earlier prompts.

A radix tree over token ids is the index; a store keeps the contents. If KV rows (the KV caches of
sequences) have blocks of a pool, shared_blocks.py is the store: rows and tree share blocks.
Otherwise attention/row_copies.py is the store: it copies the arrays of rows. Pure.
"""

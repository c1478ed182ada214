"""The prefix cache: prompts reuse keys, values and states of earlier ones with the same prefix.

A radix tree over token ids says what is cached; a store keeps it, as copies or as shared blocks.
"""

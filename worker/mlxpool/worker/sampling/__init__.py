"""From logits to tokens: options of many rows as arrays, penalties, truncation, the draw.

A draw depends on the seed and the position alone.
"""

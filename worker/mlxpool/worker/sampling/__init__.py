"""Sampling of tokens from logits: penalties, filters and the random choice, for many batch rows.

A random choice depends only on seed and position, so a resumed sequence gets the same tokens.
"""

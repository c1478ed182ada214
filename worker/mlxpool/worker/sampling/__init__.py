"""Samples tokens from logits: penalties, top-k, top-p, min-p and the random choice of many rows.

A random choice depends only on seed and position, so a resumed sequence gets the same tokens.
"""

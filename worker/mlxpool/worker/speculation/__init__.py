"""Speculative decoding: drafts of next tokens, and how many of them a step checks for each row.

A pass checks a draft in the place of a decode step; the model's own draw at each position decides,
so answers have the same tokens with and without. No MLX and no I/O; times are arguments.
"""

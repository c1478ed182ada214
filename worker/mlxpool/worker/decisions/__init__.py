"""Decisions: questions whose answers are given, as prompts and as probabilities of next tokens.

Imports no MLX. `decide` reads a text once and each question behind it; see docs/decisions.md.
"""

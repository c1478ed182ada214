"""Questions with given answers, as prompts and probabilities of next tokens.

Imports no MLX. `decide` reads a text once and each question after it; see docs/decisions.md.
"""

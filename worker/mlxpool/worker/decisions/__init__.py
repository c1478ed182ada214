"""Multiple-choice questions as prompts, and the probabilities of their answers.

Imports no MLX. `decide` reads a text once and each question after it; see docs/decisions.md.
"""

"""Formats of answers: grammars, compiled with llguidance, and masks of next tokens.

Imports no MLX. Only this package imports llguidance, and what a worker imports at its start does so
where it calls it.
"""

"""Constrained decoding: compiled grammars of response formats, and masks of the next tokens.

Imports no MLX. Only this package imports llguidance. Modules that a worker imports at its start
import it inside of functions.
"""

"""Formats of answers: grammars, compiled with llguidance, and masks of next tokens.

Imports no MLX. Only this package imports llguidance. Modules that a worker imports at its start
import it inside of functions.
"""

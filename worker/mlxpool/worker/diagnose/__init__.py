"""Checks models without serving them: their kind, needs and errors.

`mlxpool check` and the broker's catalogue run it in a separate process.
"""

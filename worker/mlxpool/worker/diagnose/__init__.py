"""Checks models without serving them: task, memory and errors.

`mlxpool check` and the broker's catalogue run this package in a separate process.
"""

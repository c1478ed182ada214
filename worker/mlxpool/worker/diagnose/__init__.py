"""Checks models without serving them: what they are and need, and what is wrong with their files.

`mlxpool check` and the broker's catalogue run it in a process of its own.
"""

"""Looks at models without serving them and says what is wrong with their files.

Used by `mlxpool check` and the broker's catalogue.
"""

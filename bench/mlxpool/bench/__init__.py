"""The scenarios of `mlxpool bench`, each of which answers one question.

Each measures in rounds in which we and peers take turns, and yields tables with ratios.
"""

"""The scenarios of `mlxpool bench`. Each scenario answers one question.

A scenario measures in rounds. In a round mlxpool and its peers take turns. A scenario yields tables
with ratios.
"""

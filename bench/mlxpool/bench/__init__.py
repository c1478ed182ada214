"""The scenarios of `mlxpool bench`. Each of them answers one question.

A scenario measures in rounds. In a round mlxpool and its peers take turns. It yields tables with
ratios.
"""

"""The scenarios of `mlxpool bench`. Each scenario answers one question.

A scenario measures in rounds. In a round mlxpool and its peers (the programs that it is compared
with) take turns. A scenario yields tables with their figures and the ratios of these figures.
"""

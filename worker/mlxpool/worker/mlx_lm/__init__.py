"""The engine of models that mlx-lm's code computes, row by row.

Only this package imports mlx-lm, and only if a worker loads such a model.
"""

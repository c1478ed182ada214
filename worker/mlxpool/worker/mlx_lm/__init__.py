"""The engine of models that mlx-lm's code computes, one sequence at a time.

Only this package imports mlx-lm, and only if a worker loads such a model.
"""

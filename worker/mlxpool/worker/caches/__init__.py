"""The data that each layer of a model caches for a sequence and for later prompts.

No MLX, no I/O: `specs` counts the bytes, `stored` describes the arrays, `kinds` has the rules for
trimming a cached prefix.
"""

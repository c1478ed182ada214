"""The worker process: its main thread, its link to the broker, signals, CPU threads, its end.

Imports no MLX.
"""

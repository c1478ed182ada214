"""Layers that models are built of, and what a model is to the rest of the worker.

No layer knows an architecture.
"""

"""Encoder models around their forward pass: inputs, settings, answers.

Encoder models embed texts, rate documents for a query, or classify. Imports no MLX: texts are
prepared in separate processes.
"""

"""Encoder models around their forward pass: texts to inputs, folders' settings, vectors to answers.

Encoder models embed texts, rate documents for a query, or classify. Imports no MLX: texts are
prepared in processes of their own.
"""

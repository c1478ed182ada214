"""Inputs, settings and answers of encoder models; the forward pass is elsewhere.

Encoder models embed texts, rate documents for a query, or classify. Imports no MLX: texts are
prepared in separate processes.
"""

"""Conversion of a text or chat to token ids, and of generated ids to text.

Imports no MLX. Chat templates run in a separate process, see chat_template/.
"""

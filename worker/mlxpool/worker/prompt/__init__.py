"""Turns a request's text or chat into token ids, and generated token ids into text.

Imports no MLX. Chat templates run in a process of their own, see chat_template/.
"""

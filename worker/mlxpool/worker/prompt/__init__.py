"""From a text or chat to token ids, and from generated ids to text.

Imports no MLX. Chat templates run in a process of their own, see chat_template/.
"""

"""Token ids of texts and chats, and texts of token ids, as vLLM has them beside OpenAI's interface.

All but the routes is pure.
"""

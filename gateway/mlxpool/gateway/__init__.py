"""An HTTP server that answers OpenAI's and Ollama's interfaces with the models of a pool.

It runs as a process of its own and reaches the broker as any client does.
"""

"""An HTTP server with OpenAI's, Anthropic's and Ollama's interfaces, for the models of a pool.

The server runs as its own process and reaches the broker as any client does.
"""

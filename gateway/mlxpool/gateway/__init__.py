"""HTTP before a pool: the interfaces of OpenAI and Ollama. A process of its own, a client."""

"""From a checked request to the pool's answer: options, images, formats, streams.

The interfaces in openai, anthropic and ollama import it; it knows none of them.
"""

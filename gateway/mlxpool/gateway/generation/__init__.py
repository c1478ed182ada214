"""Turns a checked request into the pool's answer: options, images, formats, streams.

The interfaces in openai, anthropic and ollama import it. It does not depend on any of them.
"""

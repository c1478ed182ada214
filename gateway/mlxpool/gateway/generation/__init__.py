"""Turns a checked request into the pool's answer: options, images, formats, streams.

The interfaces in openai, anthropic and ollama import this package. It depends on no interface.
"""

"""Ollama's interface: routes, fields and checks of requests, responses.

Requests and responses are pure: they do no I/O.
"""

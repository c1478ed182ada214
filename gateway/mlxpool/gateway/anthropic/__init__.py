"""Anthropic's Messages: routes, fields and checks of requests, responses.

All but the routes is pure.
"""

"""Anthropic's Messages: routes, fields and checks of requests, responses.

All modules but the routes are pure.
"""

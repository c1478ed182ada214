"""OpenAI's Responses: routes, fields and checks of requests, responses and their events.

A request has the whole conversation, unless it continues a stored response. All modules but the
routes are pure.
"""

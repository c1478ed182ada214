"""OpenAI's Responses: routes, fields and checks of requests, responses and their events.

A request has the whole conversation, unless it continues a kept response. All but the routes is
pure.
"""

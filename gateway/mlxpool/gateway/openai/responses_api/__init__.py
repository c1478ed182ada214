"""OpenAI's Responses: routes, fields and checks of requests, responses and their events.

Nothing is kept, so a request has the whole conversation. All but the routes is pure.
"""

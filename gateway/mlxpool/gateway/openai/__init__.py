"""The endpoints of OpenAI's interface: routes, checks of requests, bodies of responses.

Requests and responses are pure: they do no I/O.
"""

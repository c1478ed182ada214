"""The endpoints of OpenAI's interface: routes, fields of requests, answers.

Fields and answers are pure.
"""

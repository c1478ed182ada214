"""The endpoints of Ollama's interface: routes, fields of requests, answers.

Fields and answers are pure.
"""

"""Measures mixed load: requests of many lengths arrive at random times at a whole server.

The pool and any server with OpenAI's completions API get the same random lengths and arrival times.
"""

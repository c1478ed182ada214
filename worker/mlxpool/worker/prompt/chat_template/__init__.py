"""Chat templates: found, run in a sandboxed process, read for the model's output format.

A template is untrusted input.
"""

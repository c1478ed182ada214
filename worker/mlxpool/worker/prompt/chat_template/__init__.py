"""Chat templates: read from the model's folder, run in a sandboxed process of their own.

A template is untrusted input.
"""

"""Chat templates: read from the model's folder, run in a separate, sandboxed process.

A template is untrusted input.
"""

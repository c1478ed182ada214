"""What operators see: one snapshot of the pool and what is rendered from it.

Read only; it changes nothing in the core.
"""

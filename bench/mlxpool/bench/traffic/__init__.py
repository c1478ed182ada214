"""Processes that measure the broker: a worker without a model, and a bare relay."""

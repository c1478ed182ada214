"""Processes of the measurement of the broker: a worker without a model, and a bare relay."""

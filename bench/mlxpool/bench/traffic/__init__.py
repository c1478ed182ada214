"""Clients and workers of measurements: processes that send requests, or answer them at once."""

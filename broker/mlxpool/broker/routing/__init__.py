"""The choice of the cheapest worker for a request, by prefix cache, speed and load.

Pure; `workers.placement` uses it.
"""

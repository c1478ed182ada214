"""The choice of the cheapest worker for a request, by cache, speed and load.

Pure; `workers.placement` uses it.
"""

"""Which worker of a model is the cheapest for a request, by its cache, its speed and its load.

Pure; `workers.placement` asks it.
"""

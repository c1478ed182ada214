"""Faults that tests inject into a worker.

Nothing here runs unless the settings of the counting model ask for it.
"""

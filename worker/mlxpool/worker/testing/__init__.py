"""Faults that tests inject into a worker: wrappers around its engine, its link and its preparer.

The worker's __main__ installs them when the settings of the counting model ask for a fault.
"""

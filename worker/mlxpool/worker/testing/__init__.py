"""Faults that tests inject into engine, link and intake.

The worker's __main__ installs these faults if the settings of the counting model have a fault.
"""

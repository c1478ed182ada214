"""Faults that tests inject into engine, link and intake.

The worker's __main__ installs them if the settings of the counting model ask for a fault.
"""

"""Counters and histograms that the core counts in.

Pure; `telemetry` renders them.
"""

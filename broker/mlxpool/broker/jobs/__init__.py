"""Jobs: requests that stay on the disk until they are done and their results are read.

This package is pure: it turns events and times into actions. `store` keeps jobs, `edge` performs
the actions.
"""

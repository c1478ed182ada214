"""Jobs: requests that stay on the disk until their results are read or expire.

The package is pure: it decides actions from events and the time. `store` keeps jobs, `edge`
performs the actions.
"""

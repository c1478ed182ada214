"""Jobs: requests that stay on the disk until they are done and their results are read.

Pure: decisions from events and a time to actions. `store` keeps jobs, `edge` performs the actions.
"""

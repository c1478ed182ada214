"""Jobs: requests that stay on the disk until they are done and read.

Pure: decisions from events and a time to actions. `store` keeps them, `edge` performs the actions.
"""

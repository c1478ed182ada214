"""Jobs: requests that are kept on the disk until they are done, whoever is there to read them.

Pure: decisions from events and a time to actions. `store` keeps them, `edge` performs the actions.
"""

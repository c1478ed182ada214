"""The admin socket: operators' commands, subscriptions and reloads.

The package also has the messages to a service manager.
"""

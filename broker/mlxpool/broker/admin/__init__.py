"""The admin socket: operators' commands, subscriptions and reloads.

Also messages to a service manager.
"""

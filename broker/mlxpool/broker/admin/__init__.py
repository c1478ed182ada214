"""The admin socket: operators' commands, subscriptions and reloads.

Messages to a service manager are here too.
"""

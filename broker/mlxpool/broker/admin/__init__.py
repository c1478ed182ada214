"""Answers operators on the admin socket: commands, subscriptions, reloads.

Also the messages to a service manager.
"""

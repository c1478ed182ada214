"""What operators ask over the admin socket: commands, subscriptions to figures, reloads.

Also the messages to a service manager.
"""

"""What operators ask over the admin socket: commands, subscriptions, reload.

Also what a service manager is told.
"""

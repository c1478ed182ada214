"""Who may connect, in which role: keys, the allow-list, and libzmq's authentication handler."""

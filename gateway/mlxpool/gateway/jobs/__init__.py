"""The pool's own jobs over HTTP: submitted, listed, read as server-sent events, cancelled."""

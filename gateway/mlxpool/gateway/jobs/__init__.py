"""The pool's own jobs over HTTP: submit, list, read as events, cancel."""

"""What each layer of a model keeps of a sequence, also for later prompts.

Pure: `specs` count bytes, `stored` says which arrays hold them, `kinds` say where a kept prefix can
be cut.
"""

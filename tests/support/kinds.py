"""The kinds of message of MLXP/1, as raw peers of tests write them."""

from __future__ import annotations

# front: client -> broker
GENERATE, CANCEL, ACK, PING = "generate", "cancel", "ack", "ping"
MODELS, TOKENIZE, DETOKENIZE = "models", "tokenize", "detokenize"
EMBED, RERANK, CLASSIFY = "embed", "rerank", "classify"
DECIDE = "decide"
KEEP = "keep"
# front: broker -> client
ACCEPTED, DELTA, DELTAS, DONE, ERROR = "accepted", "delta", "deltas", "done", "error"
FATE, PONG, TOKENS, VECTORS = "fate", "pong", "tokens", "vectors"
DECISIONS = "decisions"
KEPT = "kept"
# back: worker -> broker
HELLO, BEAT, CREDIT, YIELD, BYE = "hello", "beat", "credit", "yield", "bye"
PROMPTS = "prompts"
# back: broker -> worker
WELCOME, HEARD, WHO, WORK, DRAIN, STOP = "welcome", "heard", "who", "work", "drain", "stop"
# admin: the one kind that is answered more than once
WATCH = "watch"

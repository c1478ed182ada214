"""The kinds of messages of MLXP/1, for tests that send raw messages."""

from __future__ import annotations

# front socket: client -> broker
GENERATE, CANCEL, ACK, PING = "generate", "cancel", "ack", "ping"
MODELS, TOKENIZE, DETOKENIZE = "models", "tokenize", "detokenize"
EMBED, RERANK, CLASSIFY = "embed", "rerank", "classify"
DECIDE = "decide"
KEEP = "keep"
# front socket: broker -> client
ACCEPTED, DELTA, DELTAS, DONE, ERROR = "accepted", "delta", "deltas", "done", "error"
FATE, PONG, TOKENS, VECTORS = "fate", "pong", "tokens", "vectors"
DECISIONS = "decisions"
KEPT = "kept"
# back socket: worker -> broker
HELLO, BEAT, CREDIT, YIELD, BYE = "hello", "beat", "credit", "yield", "bye"
PROMPTS = "prompts"
# back socket: broker -> worker
WELCOME, HEARD, WHO, WORK, DRAIN, STOP = "welcome", "heard", "who", "work", "drain", "stop"
# admin socket: the only kind with several answers
WATCH = "watch"

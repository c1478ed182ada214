"""Drafts of next tokens, and how many of them a step checks for each row.

A pass checks a draft in the place of a decode step; the model's own draw at each position decides,
so answers have the same tokens with and without. No MLX and no I/O; times are arguments.

speculator.py is the policy: which rows have drafts, of those that row_search.py has looked at, and
by depths.py how many, by the costs in step_times.py. drafter.py is the interface of what proposes
them: ngram.py (its search is ngram_search.py), mtp.py (computed by attention/prediction_heads) and
model_drafter.py (computed by worker/draft_model); best_drafter.py picks one for each row.
compute/drafting_rows.py calls this package and reads the clock, and sampling/batch.py keeps the
drafts that were right.
"""

"""Speculative decoding: makes drafts of next tokens, and chooses their number for each row.

A pass that checks drafts replaces a decode step. The model's own sample at each position decides,
so answers have the same tokens with and without drafts. No MLX and no I/O; times are arguments.

speculator.py is the policy. row_search.py examines rows for drafts. depths.py chooses the number of
drafts of each row, by the costs in step_times.py. drafter.py is the interface of drafters. The
drafters are ngram.py (its search is ngram_search.py), mtp.py (computed by
attention/prediction_heads) and model_drafter.py (computed by worker/draft_model). best_drafter.py
picks a drafter for each row. compute/drafting_rows.py calls this package and reads the clock.
sampling/batch.py accepts the right drafts.
"""

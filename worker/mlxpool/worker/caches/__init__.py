"""The data that each layer of a model keeps of a sequence, also for later prompts.

Pure: `specs` counts the bytes, `stored` describes the arrays that hold them, `kinds` has the rules
for cuts of a kept prefix.
"""

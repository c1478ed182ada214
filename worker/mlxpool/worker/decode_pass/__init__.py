"""A single kernel that computes the whole decode step of a small dense model, for all rows.

With a kernel for each operation, such a step has about 130 kernels, and the host needs more time to
launch them than the device to run them. The kernel of cuda/decode_pass.cu computes all layers of
models such as llama and qwen2 in one launch. Its thread blocks wait for each other between the
parts of a layer. `model_weights.py` decides which models the kernel supports, `kernel.py` builds,
tries and launches it, and `decode_pass.py` allocates its memory. Other passes, and passes of other
models, run a kernel for each operation.
"""

"""One kernel for a decode step of all rows, for small dense models.

The host needs more time to launch the 130 kernels of such a pass than the device to run them. The
kernel of cuda/decode_pass.cu computes all layers of models such as llama and qwen2 in one launch.
The thread blocks wait for each other between the parts of a layer. `model_weights.py` decides which
models the kernel supports, `kernel.py` builds, tries and launches it, and `decode_pass.py` has the
memory of launches. Other passes, and passes of other models, run a kernel for each operation.
"""

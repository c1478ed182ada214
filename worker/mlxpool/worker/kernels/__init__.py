"""Our own kernels: CUDA texts in cuda/*.cu, compiled at first use, and `cpu_exp` for CPUs.

The module device.py asks MLX for the device's memory and health. Some kernels write into their
input arrays, which MLX's value semantics does not provide for. It is correct because the arrays of
the pool are whole, contiguous and never replaced, because in an evaluation in which a kernel writes
an array nothing else uses it, and because readers of what was written depend on the kernel's
output: they add it (a 0) to their own numbers, or, as ragged_attention.attend does with the queries
that block_write.rotate_and_write returns, and ragged_latents.attend with those of
latent_lines.norm_and_write, they need it anyway; or the kernel that writes a row's line is its only
reader, as with FreshLines. MLX orders kernels by their output arrays and does not see these writes.
`ensure_row_contiguous=False` keeps MLX from passing a copy. work_list.py divides ragged attention
among thread blocks on the host. recurrent/ has the kernels of layers with states; they write into
no input.
"""

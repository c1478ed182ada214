"""Our own kernels: CUDA sources in cuda/*.cu, compiled at first use, and `cpu_exp` for CPUs.

device.py reads the device's memory and health from MLX. work_list.py divides ragged attention among
thread blocks, on the host. recurrent/ has the kernels of layers with states; these kernels write
into no input.

Some other kernels write into their input arrays. MLX has value semantics: it orders kernels by
their output arrays and does not see these writes. The writes are correct because

- the arrays of the pool are whole, contiguous and never replaced;
- nothing else in the same evaluation uses an array that a kernel writes;
- readers of written numbers depend on the kernel's output. They add it (a 0) to their own numbers,
  or need it anyway: ragged_attention.attend needs the queries that block_write.rotate_and_write
  returns, ragged_latents.attend those of latent_lines.norm_and_write. Or the kernel that writes a
  row's line is its only reader, as with FreshLines.

`ensure_row_contiguous=False` prevents MLX from passing a copy.
"""

"""Our own kernels: CUDA sources in cuda/*.cu, compiled at first use, and `cpu_exp` for CPUs.

device.py reads the device's memory and health from MLX. work_list.py divides ragged attention among
thread blocks, on the host. recurrent/ has the kernels of layers with states; these kernels write
into no input.

Some other kernels write into their input arrays. MLX has value semantics: it orders kernels by
their output arrays and does not see these writes. The writes are correct because

- the arrays of the block pool are whole, contiguous and never replaced;
- nothing else in the same evaluation uses an array that a kernel writes;
- readers of written numbers depend on the kernel's output. Some readers add this output (a 0) to
  their own numbers. Others need the output as their input: ragged_attention.attend needs the
  queries from block_write.rotate_and_write, and ragged_latents.attend needs the queries from
  latent_lines.norm_and_write. With FreshLines, the writing kernel is the only reader of the token's
  keys and values.

`ensure_row_contiguous=False` prevents MLX from passing a copy.
"""

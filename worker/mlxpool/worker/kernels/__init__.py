"""Our own kernels. CUDA's are compiled by MLX at their first use; each has its text in a .cu file.
On a CPU there is `exponential`, of MLX's operations.

Some write into their input arrays, which is outside MLX's value semantics. That holds because the
pool's arrays are whole, contiguous and never replaced, nothing else touches one of them in an
evaluation in which a kernel writes it, and whoever reads what was written takes the kernel's output
into its own numbers: MLX orders kernels by the arrays they write, and does not know of ours.
`ensure_row_contiguous=False` keeps it from handing a copy to them.
"""

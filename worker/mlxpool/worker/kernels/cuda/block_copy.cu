// Copies a block of the pool to another, 16 bytes a thread.
long at = (long)blockIdx.x * blockDim.x + threadIdx.x;
if (at < COUNT) {
  uint4* const all = (uint4*)pool;
  all[blocks[1] * (long)COUNT + at] = all[blocks[0] * (long)COUNT + at];
}
if (at == 0) done[0] = 0;

// Rows of a table: line t of `out` is row ids[t]. A thread copies 16 bytes.
const long i = (long)blockIdx.x * blockDim.x + threadIdx.x;
if (i < (long)ids_shape[0] * PIECES)
  ((uint4*)out)[i] = ((const uint4*)table)[(long)ids[i / PIECES] * PIECES + i % PIECES];

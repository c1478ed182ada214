// The numbers of some columns of each row: out[r, j] is table[r, ids[r, j]].
const long i = (long)blockIdx.x * blockDim.x + threadIdx.x;
if (i < (long)ids_shape[0] * ids_shape[1])
  out[i] = table[i / ids_shape[1] * table_shape[1] + ids[i]];

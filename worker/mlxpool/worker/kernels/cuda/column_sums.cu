// The sum of the values that each column has in a row's list. A thread block has one row: it writes
// zeros, then adds the values; ids that are not columns are skipped.
const long row = blockIdx.x;
const int width = ids_shape[1];
float* const sums = out + row * SIZE;
for (int column = threadIdx.x; column < SIZE; column += blockDim.x) sums[column] = 0;
__syncthreads();
for (int j = threadIdx.x; j < width; j += blockDim.x) {
  const int column = ids[row * width + j];
  if (column >= 0 && column < SIZE) atomicAdd(&sums[column], values[EACH ? row * width + j : 0]);
}

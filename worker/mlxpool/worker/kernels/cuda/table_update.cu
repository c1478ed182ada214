// Writes blocks into the block tables of rows: updates [2, N] are places and blocks; place -1: no update.
const int at = blockIdx.x * blockDim.x + threadIdx.x, count = updates_shape[1];
if (at < count && updates[at] >= 0) {
  ((int*)tables)[updates[at]] = updates[count + at];
}
if (at == 0) done[0] = 0;

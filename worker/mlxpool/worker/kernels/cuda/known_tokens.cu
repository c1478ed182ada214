// Ids of tokens; a negative id stands for a token that the pass in flight draws.
const int at = blockIdx.x * blockDim.x + threadIdx.x;
if (at < ids_shape[0]) {
  known[at] = ids[at] >= 0 ? ids[at] : drawn[-1 - ids[at]];
}

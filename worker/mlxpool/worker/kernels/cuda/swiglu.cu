// silu(gate) * up of the two halves of each line [2 * WIDTH] of `both`, rounded like the separate
// operations. A thread makes eight neighbouring numbers of a line.
const long i = (long)blockIdx.x * blockDim.x + threadIdx.x;
if (i < (long)both_shape[0] * (WIDTH / 8)) {
  const N* const line = (const N*)both + i / (WIDTH / 8) * 2 * WIDTH + i % (WIDTH / 8) * 8;
  const Some<N, 8> gate = *(const Some<N, 8>*)line, beside = *(const Some<N, 8>*)(line + WIDTH);
  Some<N, 8> product;
  #pragma unroll
  for (int n = 0; n < 8; n++) {
    // The sigmoid is rounded, then its product with the gate.
    down(1 / (1 + expf(-up(gate.n[n]))), &product.n[n]);
    down(up(gate.n[n]) * up(product.n[n]), &product.n[n]);
    down(up(product.n[n]) * up(beside.n[n]), &product.n[n]);
  }
  ((Some<N, 8>*)out)[i] = product;
}

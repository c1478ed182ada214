// Dequantises an affine weight. A thread makes eight neighbouring numbers at a time.
const long count = (long)scales_shape[0] * scales_shape[1] * (GROUP / 8);
const long first = (long)blockIdx.x * blockDim.x * TIMES + threadIdx.x;
unsigned long long packed[TIMES];
float scale[TIMES], bias[TIMES];
#pragma unroll
for (int n = 0; n < TIMES; n++) {
  const long at = min(first + n * blockDim.x, count - 1);
  packed[n] = packed_numbers<BITS>(weight, at);
  scale[n] = up(scales[at / (GROUP / 8)]);
  bias[n] = up(biases[at / (GROUP / 8)]);
}
#pragma unroll
for (int n = 0; n < TIMES; n++) {
  const long at = first + n * blockDim.x;
  if (at >= count) return;
  ((Some<N, 8>*)out)[at] = unpacked<BITS, N>(packed[n], scale[n], bias[n]);
}

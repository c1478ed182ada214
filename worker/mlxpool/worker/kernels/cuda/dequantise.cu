// Dequantises an affine weight. A thread makes eight neighbouring numbers at a time: they take BITS
// bytes of the weight and belong to one group.
const long count = (long)scales_shape[0] * scales_shape[1] * (GROUP / 8);
const long first = (long)blockIdx.x * blockDim.x * TIMES + threadIdx.x;
const unsigned char* const bytes = (const unsigned char*)weight;
unsigned long long packed[TIMES];
float scale[TIMES], bias[TIMES];
#pragma unroll
for (int n = 0; n < TIMES; n++) {
  const long at = min(first + n * blockDim.x, count - 1);
  if (BITS == 8) packed[n] = ((const unsigned long long*)weight)[at];
  else if (BITS == 4) packed[n] = ((const unsigned*)weight)[at];
  else if (BITS == 2) packed[n] = ((const unsigned short*)weight)[at];
  else {
    packed[n] = 0;
    #pragma unroll
    for (int i = 0; i < BITS; i++) packed[n] |= (unsigned long long)bytes[at * BITS + i] << (8 * i);
  }
  scale[n] = up(scales[at / (GROUP / 8)]);
  bias[n] = up(biases[at / (GROUP / 8)]);
}
#pragma unroll
for (int n = 0; n < TIMES; n++) {
  const long at = first + n * blockDim.x;
  if (at >= count) return;
  Some<N, 8> numbers;
  #pragma unroll
  for (int i = 0; i < 8; i++)
    down((float)(unsigned)(packed[n] >> (i * BITS) & (1u << BITS) - 1) * scale[n] + bias[n],
         &numbers.n[i]);
  ((Some<N, 8>*)out)[at] = numbers;
}

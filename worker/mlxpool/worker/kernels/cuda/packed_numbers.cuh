// Eight neighbouring numbers of an affine weight. They take BITS bytes and belong to one group.
template <int BITS> __device__ inline unsigned long long packed_numbers(const void* weight, long at) {
  if (BITS == 8) return ((const unsigned long long*)weight)[at];
  if (BITS == 4) return ((const unsigned*)weight)[at];
  if (BITS == 2) return ((const unsigned short*)weight)[at];
  unsigned long long packed = 0;
  #pragma unroll
  for (int i = 0; i < BITS; i++)
    packed |= (unsigned long long)((const unsigned char*)weight)[at * BITS + i] << (8 * i);
  return packed;
}
template <int BITS, typename N>
__device__ inline Some<N, 8> unpacked(unsigned long long packed, float scale, float bias) {
  Some<N, 8> numbers;
  #pragma unroll
  for (int i = 0; i < 8; i++)
    down((float)(unsigned)(packed >> (i * BITS) & (1u << BITS) - 1) * scale + bias, &numbers.n[i]);
  return numbers;
}

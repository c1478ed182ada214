__device__ inline unsigned pair(float low, float high, __half) {
  __half2 both = __floats2half2_rn(low, high);
  return *(unsigned*)&both;
}
__device__ inline unsigned pair(float low, float high, __nv_bfloat16) {
  __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return *(unsigned*)&both;
}
__device__ inline __half2 both_halves(__half x) { return __half2half2(x); }
__device__ inline __nv_bfloat162 both_halves(__nv_bfloat16 x) { return __bfloat162bfloat162(x); }
// The lowest four bits of both halves of a word as numbers, times scale plus bias. They are put into
// the mantissa of 1,024, or of 128, which is then subtracted.
__device__ inline unsigned dequantised_pair(unsigned word, __half2 scale, __half2 bias) {
  word = word & 0x000f000f | 0x64006400;
  __half2 both = __hfma2(__hsub2(*(__half2*)&word, __float2half2_rn(1024.f)), scale, bias);
  return *(unsigned*)&both;
}
__device__ inline unsigned dequantised_pair(unsigned word, __nv_bfloat162 scale, __nv_bfloat162 bias) {
  word = word & 0x000f000f | 0x43004300;
  __nv_bfloat162 both = __hfma2(
      __hsub2(*(__nv_bfloat162*)&word, __float2bfloat162_rn(128.f)), scale, bias);
  return *(unsigned*)&both;
}
__device__ inline unsigned product_pair(unsigned a, unsigned b, __half) {
  __half2 both = __hmul2(*(__half2*)&a, *(__half2*)&b);
  return *(unsigned*)&both;
}
__device__ inline unsigned product_pair(unsigned a, unsigned b, __nv_bfloat16) {
  __nv_bfloat162 both = __hmul2(*(__nv_bfloat162*)&a, *(__nv_bfloat162*)&b);
  return *(unsigned*)&both;
}
// Eight numbers of x times their gains; adds the squares of x to `squares`.
template <typename N> __device__ inline uint4 weighed(uint4 x, uint4 by, float& squares, N) {
  const Some<N, 8> some = *(const Some<N, 8>*)&x;
  #pragma unroll
  for (int i = 0; i < 8; i++) squares += up(some.n[i]) * up(some.n[i]);
  return {product_pair(x.x, by.x, N()), product_pair(x.y, by.y, N()), product_pair(x.z, by.z, N()), product_pair(x.w, by.w, N())};
}
// The descriptor of a matrix in shared memory whose lines of 128 bytes are swizzled, eight in 1,024 bytes. `apart`: pieces
// of 16 bytes from a panel to the next one, of transposed matrices wider than one.
__device__ inline unsigned long long matrix_at(unsigned at, unsigned long long apart = 1) {
  return (unsigned long long)((at & 0x3ffff) >> 4) | apart << 16 | 64ull << 32 | 1ull << 62;
}

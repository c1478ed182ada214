// Affine numbers of 4 bits, nibbles p and p + 4 of a word, as pairs of N.
// A nibble n in the mantissa of OFFSET, a power of two, is OFFSET + n, exactly.
template <typename N> struct Raised;
template <> struct Raised<__half> {
  static constexpr unsigned PAIR = 0x64006400, ONES = 0x3c003c00;
  static constexpr float OFFSET = 1024;
};
template <> struct Raised<__nv_bfloat16> {
  static constexpr unsigned PAIR = 0x43004300, ONES = 0x3f803f80;
  static constexpr float OFFSET = 128;
};
// Raised<N>::PAIR, in a register: as a constant it would make two instructions of `raised`. `positive` is any
// positive number whose sign the compiler does not know.
template <typename N> __device__ inline unsigned held_pair(int positive) {
  return Raised<N>::PAIR - ((unsigned)positive >> 31);
}
// Nibbles p and p + 4 of a word, raised.
__device__ inline unsigned raised(unsigned word, int p, unsigned held) { return word >> 4 * p & 0x000f000f | held; }
// Both numbers of a raised pair times scale plus bias.
__device__ inline unsigned lowered(unsigned pair, __half scale, __half bias) {
  __half2 both = __hfma2(__hsub2(*(__half2*)&pair, __float2half2_rn(1024.f)), both_halves(scale), both_halves(bias));
  return *(unsigned*)&both;
}
__device__ inline unsigned lowered(unsigned pair, __nv_bfloat16 scale, __nv_bfloat16 bias) {
  __nv_bfloat162 both
      = __hfma2(__hsub2(*(__nv_bfloat162*)&pair, __float2bfloat162_rn(128.f)), both_halves(scale), both_halves(bias));
  return *(unsigned*)&both;
}

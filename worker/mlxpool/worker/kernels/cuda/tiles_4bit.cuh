// An affine 4-bit weight [rows, columns] in tiles of 64 x 64 numbers, one row of tiles behind the other. A tile
// is four fragments of 16 rows, each of them contiguous: the words of 32 lanes, four each, then the scales and
// biases. They are in the order of the first operand of a product in tensor cores: lane l has numbers of rows
// l / 4 and l / 4 + 8, in its word j of columns 16 * j + l % 4 * 2, the next one, and those 8 columns further:
// nibbles p and p + 4 are neighbours of row l / 4 + p % 2 * 8 and columns + p / 2 * 8. Behind the words each of
// the first eight rows has, for each group, its scale, that of 8 rows further, and both biases.
constexpr int GROUPS = 64 / GROUP;  // of a row in a tile
constexpr int FRAGMENT = 512 + 64 * GROUPS;  // bytes
// The offset in bytes of a fragment, the `row`-th of 16 rows, in a weight with `steps` tiles in a row of them.
__device__ inline long fragment_offset(int row, int step, int steps) {
  return (((long)(row / 4) * steps + step) * 4 + row % 4) * FRAGMENT;
}
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
// number of which the compiler does not know that.
template <typename N> __device__ inline unsigned held_pair(int positive) {
  return Raised<N>::PAIR - ((unsigned)positive >> 31);
}
// Nibbles p and p + 4 of a word, raised.
__device__ inline unsigned raised(unsigned word, int p, unsigned held) { return word >> 4 * p & 0x000f000f | held; }
// Both of them times scale plus bias.
__device__ inline unsigned lowered(unsigned pair, __half scale, __half bias) {
  __half2 both = __hfma2(__hsub2(*(__half2*)&pair, __float2half2_rn(1024.f)), both_halves(scale), both_halves(bias));
  return *(unsigned*)&both;
}
__device__ inline unsigned lowered(unsigned pair, __nv_bfloat16 scale, __nv_bfloat16 bias) {
  __nv_bfloat162 both
      = __hfma2(__hsub2(*(__nv_bfloat162*)&pair, __float2bfloat162_rn(128.f)), both_halves(scale), both_halves(bias));
  return *(unsigned*)&both;
}

// Quantised weights of experts in the order of tensor cores: fragments [experts, rows / 16, columns / 64] of 16 rows and
// 64 columns, each of them contiguous. BITS a number, in groups of GROUP; FLOATS are mxfp4, others affine.
// Lane l has numbers of rows l / 4 and l / 4 + 8: pair p of 16 columns j is those of row l / 4 + p % 2 * 8 and columns
// 16 * j + l % 4 * 2 + p / 2 * 8 and the next. With 4 bits, a lane has four words, one for each j: pair p of affine
// numbers is nibbles p and p + 4; for floats see below. With 8 bits it has two words for each j, the second with pairs 2
// and 3; the words of j = 2 and 3 of all lanes follow the words of j = 0 and 1.
// After the words, each of the first eight rows has for each group its scale and the scale of the row 8 rows further, and
// affine rows both biases.
constexpr int WORDS = 128 * BITS, FRAGMENT_GROUPS = 64 / GROUP;  // bytes of numbers; groups of a row
constexpr int FACTORS = FRAGMENT_GROUPS * (FLOATS ? 2 : 8);  // bytes of the scales and biases of two rows
constexpr int FRAGMENT = WORDS + 8 * FACTORS;  // bytes
// Numbers of E2M1 (a sign, two bits of exponent, one of fraction): after a rotation of the word to the left by TURNS[p],
// the sign of pair p is bit 15 of each half and the others are bits 8 to 6, as in bfloat16. The upper bit of the exponent
// of the fourth pair needs a rotation by TURNS[4], because the bits of four pairs do not fit into a half in this way.
constexpr int TURNS[] = {0, 4, 10, 6, 14};
constexpr unsigned EVERY = 0x81c081c0, UPPER = 0x01000100;
__device__ inline unsigned turned(unsigned word, int left) { return word << left | word >> (32 - left) % 32; }
// A lane's words and factors of a fragment.
struct Fragment {
  alignas(16) unsigned words[BITS / 4][4];
  alignas(16) unsigned factors[FACTORS / 4];
};
// 2 to the power of an E8M0 scale minus 127, times the constant factor of pairs of floats, in both halves. Scales of
// bfloat16 are 128 at most.
__device__ inline unsigned float_factor(unsigned scale, __nv_bfloat16) { return scale * 0x00800080 + 0x3f003f00; }
__device__ inline unsigned float_factor(unsigned scale, __half) {
  const int bits = scale > 98 ? min(scale - 98, 31u) << 10 : scale > 88 ? 1 << scale - 89 : 0;
  return bits * 0x10001;
}
__device__ inline unsigned placed(unsigned pair, __nv_bfloat16) { return pair; }
__device__ inline unsigned placed(unsigned pair, __half) { return pair & 0x80008000 | (pair & 0x01c001c0) << 3; }
// A byte of an affine number of 8 bits, by the mantissa of 2^23.
__device__ inline float byte_of(unsigned word, int at, float scale, float bias) {
  return fmaf(__uint_as_float(__byte_perm(word, 0x4b000000, 0x7540 | at)) - 8388608.f, scale, bias);
}
// Dequantises the numbers of 16 columns into a first operand. They are rounded to N after they are multiplied by the
// scale. `held`: see `held_pair`.
template <typename N>
__device__ inline void open_columns(const Fragment& fragment, int j, unsigned held, unsigned (&a)[4]) {
  const unsigned* const words = fragment.words[0];
  const int group = j * 16 / GROUP;
  #pragma unroll
  for (int p = 0; p < 4; p++) {
    if (FLOATS) {
      const unsigned word = words[j], scale = __byte_perm(fragment.factors[0], 0, 0x4440 | group * 2 + p % 2);
      unsigned both = (p == 2 ? turned(word, TURNS[2]) : word << TURNS[p]) & (p < 3 ? EVERY : EVERY & ~UPPER);
      if (p == 3) both |= turned(word, TURNS[4]) & UPPER;
      a[p] = product_pair(placed(both, N()), float_factor(scale, N()), N());
      continue;
    }
    const Some<N, 4> some = *(const Some<N, 4>*)&fragment.factors[FLOATS ? 0 : group * 2];
    const N scale = some.n[p % 2], bias = some.n[2 + p % 2];
    if (BITS == 4) {
      a[p] = lowered(raised(words[j], p, held), scale, bias);
    } else {
      const unsigned word = words[j * BITS / 4 + p / 2];
      const int at = p % 2 * 2;
      a[p] = pair(byte_of(word, at, up(scale), up(bias)), byte_of(word, at + 1, up(scale), up(bias)), N());
    }
  }
}

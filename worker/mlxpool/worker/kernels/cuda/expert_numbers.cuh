// Dequantises pairs of neighbours of a row in registers, for expert_product_packed.cu.
template <typename N, bool FLOATS> struct ScaleOf { using Type = N; };
template <typename N> struct ScaleOf<N, true> { using Type = unsigned char; };
// A group of a row: its numbers are rounded to N after they are multiplied by the scale. Of 16 neighbours, in BITS / 2
// words, `pair` is numbers 2 * at and the next. `pair_apart` is number at % 4 of the first or second eight and the fourth
// after it, which takes fewer instructions.
template <typename N, int BITS, bool FLOATS> struct Opened;
// Affine numbers of 4 bits.
template <typename N> struct Opened<N, 4, false> {
  decltype(both_halves(N())) scale, bias;
  __device__ Opened(N its_scale, N its_bias) : scale(both_halves(its_scale)), bias(both_halves(its_bias)) {}
  __device__ unsigned pair(const unsigned (&words)[2], int at) const {
    return dequantised_pair(__byte_perm(words[at / 4], 0, 0x4440 | at % 4) * 0x1001, scale, bias);
  }
  __device__ unsigned pair_apart(const unsigned (&words)[2], int at) const {
    return dequantised_pair(words[at / 4] >> at % 4 * 4, scale, bias);
  }
};
// Affine numbers of 8 bits.
template <typename N> struct Opened<N, 8, false> {
  float scale, bias;
  __device__ Opened(N its_scale, N its_bias) : scale(up(its_scale)), bias(up(its_bias)) {}
  __device__ float one(unsigned word, int at) const {  // put into the mantissa of 2^23
    return fmaf(__uint_as_float(__byte_perm(word, 0x4b000000, 0x7540 | at)) - 8388608.f, scale, bias);
  }
  __device__ unsigned pair(const unsigned (&words)[4], int at) const {
    return ::pair(one(words[at / 2], at % 2 * 2), one(words[at / 2], at % 2 * 2 + 1), N());
  }
  __device__ unsigned pair_apart(const unsigned (&words)[4], int at) const {
    return ::pair(one(words[at / 4 * 2], at % 4), one(words[at / 4 * 2 + 1], at % 4), N());
  }
};
// 2 to the power of an E8M0 scale minus 127, times what `float_pair` must be multiplied by. Scales above 128, which
// stand for 4 and more, become infinite.
__device__ inline unsigned factor_bits(int scale, __nv_bfloat16) { return min(scale + 126, 255) << 7; }
__device__ inline unsigned factor_bits(int scale, __half) {
  return scale > 98 ? min(scale - 98, 31) << 10 : scale > 88 ? 1 << scale - 89 : 0;
}
// The two numbers of a byte, of E2M1 (a sign, two bits of exponent, one of fraction), as the upper bits of N.
__device__ inline unsigned float_pair(unsigned byte, __nv_bfloat16) {
  return byte * (0x1001u << 6) & 0x01c001c0 | byte * (0x1001u << 12) & 0x80008000;
}
__device__ inline unsigned float_pair(unsigned byte, __half) {
  return byte * (0x1001u << 9) & 0x0e000e00 | byte * (0x1001u << 12) & 0x80008000;
}
// The same of number `at` of a word and the fourth after it.
__device__ inline unsigned shifted(unsigned word, int left) { return left > 0 ? word << left : word >> -left; }
__device__ inline unsigned float_pair_apart(unsigned word, int at, __nv_bfloat16) {
  return shifted(word, 6 - 4 * at) & 0x01c001c0 | shifted(word, 12 - 4 * at) & 0x80008000;
}
__device__ inline unsigned float_pair_apart(unsigned word, int at, __half) {
  return shifted(word, 9 - 4 * at) & 0x0e000e00 | shifted(word, 12 - 4 * at) & 0x80008000;
}
template <typename N> struct Opened<N, 4, true> {
  unsigned factor;
  __device__ Opened(unsigned char scale, unsigned char) : factor(factor_bits(scale, N()) * 0x10001) {}
  __device__ unsigned pair(const unsigned (&words)[2], int at) const {
    return product_pair(float_pair(__byte_perm(words[at / 4], 0, 0x4440 | at % 4), N()), factor, N());
  }
  __device__ unsigned pair_apart(const unsigned (&words)[2], int at) const {
    return product_pair(float_pair_apart(words[at / 4], at % 4, N()), factor, N());
  }
};

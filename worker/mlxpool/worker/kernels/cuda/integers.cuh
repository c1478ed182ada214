// Keys and values as 8-bit integers with a scale for each token and head, see caches/stored.py.
// Stores a head as integers and their scale: each lane of a warp has EACH neighbouring numbers of the head. An
// infinity or NaN among them makes the scale infinite or NaN.
template <int EACH>
__device__ inline void store_integers(const float (&numbers)[EACH], int8_t* to, __nv_bfloat16* scale_to) {
  const int lane = threadIdx.x % 32;
  float most = 0;
  #pragma unroll
  for (int n = 0; n < EACH; n++) {
    const float size = fabsf(numbers[n]);
    if (size > most || size != size) most = size;
  }
  #pragma unroll
  for (int other = 1; other < 32; other *= 2) {
    const float size = __shfl_xor_sync(0xffffffff, most, other);
    if (size > most || size != size) most = size;
  }
  __nv_bfloat16 scale;
  down(most / 127.f, &scale);
  const float divisor = up(scale);
  #pragma unroll
  for (int n = 0; n < EACH; n++)
    to[lane * EACH + n]
        = divisor > 0 ? (int8_t)fminf(fmaxf(rintf(numbers[n] / divisor), -127.f), 127.f) : 0;
  if (lane == 0) *scale_to = scale;
}
// Byte `at` of a word whose bytes are integers plus 128, as a number: it is put into the mantissa of 2^23.
__device__ inline float integer_at(unsigned word, int at) {
  return __uint_as_float(__byte_perm(word, 0x4b000000, 0x7540 | at)) - 8388736.f;
}
// Four neighbouring integers in shared memory, plus 128 each.
__device__ inline unsigned four_integers(const char* from) { return *(const unsigned*)from ^ 0x80808080; }
// Shares of values are multiplied by the values' scales and by SHARE_SCALE, a power of two with which they
// stay in the range of float16; the sums are divided by it.
constexpr float SHARE_SCALE = 64;

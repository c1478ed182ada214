// Products of up to HELD_LINES tokens ("lines") with an affine 4-bit weight in tiles (tiles_4bit.cuh), as in
// matmul_4bit_few.cu, but of integers, so a weight needs 3 instructions for 8 numbers instead of 7.
// 64 columns of a line become integers of 16 bits and their scale, with an error of 2^-16 of the greatest of them.
// Their two bytes are two columns of the tensor cores' second operand. A warp makes the integers of its own columns,
// once: with more lines that takes longer than it saves. Each group's scale and bias are applied to the sums.
// NORMED: x is multiplied by `gain` here and divided by its RMS at the end (warp_sums.cuh).
constexpr int SETS = 1, TILES = FRAGMENTS, THREADS = WARPS * 32, RUNS = GATED ? 2 : 1, LANE_LINES = 1;
constexpr int EACH = 16 * FRAGMENTS / RUNS;  // results of a strip for a line
constexpr int STAGE = FRAGMENTS * FRAGMENT, RUN = STAGE / RUNS;  // bytes; of neighbouring fragments
constexpr int FACTORS = GROUPS == 1 ? 2 : 4;  // of 64 columns of a line: the scale, and it times each group's sum
constexpr int MOST = 127 * 256 + 127;  // the greatest integer with two signed bytes
const int LINES = x_shape[0], IN = x_shape[1], STEPS = IN / 64, OUT = weight_shape[0] * 64 / RUNS;
const int strips = OUT / EACH;
extern __shared__ uint4 space[];  // [WARPS][STAGES] stages, the integers of lines, their factors, the sums of the warps
const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, line = lane >> 2, quarter = lane & 3;
const char* const stages = (const char*)space + warp * STAGES * STAGE;
const unsigned base = shared_address(stages);
unsigned* const all_integers = (unsigned*)((char*)space + WARPS * STAGES * STAGE);
float* const all_factors = (float*)(all_integers + WARPS * HELD_STEPS * HELD_LINES * 32);
unsigned* const gains = (unsigned*)(all_factors + WARPS * HELD_STEPS * HELD_LINES * FACTORS) + warp * HELD_STEPS * 32;
float* const found = all_factors + WARPS * HELD_STEPS * (HELD_LINES * FACTORS + (NORMED ? 32 : 0));
unsigned* const integers = all_integers + warp * HELD_STEPS * HELD_LINES * 32;  // [HELD_STEPS][HELD_LINES][2][4][4]
float* const factors = all_factors + warp * HELD_STEPS * HELD_LINES * FACTORS;
const long apart = fragment_offset(OUT / 16, 0, STEPS);  // from gates to ups
// Offsets in a stage that this lane copies to and reads from; kept, as each step would compute them anew.
unsigned words_at = lane * 16, factors_at = 512 + line * GROUPS * 8;
hold(words_at);
hold(factors_at);
int ahead_strip = blockIdx.x, ahead_step = warp;
unsigned ahead = base;  // its stage
auto first_piece = [&] {
  return (const char*)weight + fragment_offset(ahead_strip * (EACH / 16), ahead_step, STEPS) + lane * 16;
};
const char* piece = first_piece();
// Copies the next step of this warp.
auto fetch = [&] {
  if (ahead_step >= STEPS) {
    ahead_strip += gridDim.x;
    ahead_step = warp;
    piece = first_piece();
  }
  if (ahead_strip < strips && ahead_step < STEPS)
    #pragma unroll
    for (int run = 0; run < RUNS; run++)
      #pragma unroll
      for (int n = 0; n < (RUN / 16 + 31) / 32; n++)
        if (n * 512 + words_at < RUN) copy(ahead + words_at + run * RUN + n * 512, piece + run * apart + n * 512);
  commit_copies();
  ahead_step += WARPS;
  piece += WARPS * 4 * FRAGMENT;
  ahead = ahead == base + (STAGES - 1) * STAGE ? base : ahead + STAGE;
};
float squares[1] = {};  // of the line of this lane's number, in one of four lanes
// Copies x, and gains, of this warp's steps to the memory of its integers: before weights, since a wait for copies
// includes all copies in flight.
#pragma unroll 1
for (int n = lane / 8; n < HELD_STEPS * HELD_LINES; n += 4) {
  const int l = min(n % HELD_LINES, LINES - 1), at = min(warp + n / HELD_LINES * WARPS, STEPS - 1) * 64 + lane % 8 * 8;
  copy(shared_address(integers + n * 32) + lane % 8 * 16, (const N*)x + (long)l * IN + at);
  if (NORMED && n % HELD_LINES == 0) copy(shared_address(gains + n / HELD_LINES * 32) + lane % 8 * 16, (const N*)gain + at);
}
commit_copies();
#pragma unroll 1
for (int n = 0; n < STAGES - 1; n++) fetch();
wait_copies<STAGES - 1>();
__syncwarp();
{  // Makes integers. A lane has two neighbouring columns.
  float lengths_of[HELD_LINES] = {};
  #pragma unroll 1
  for (int held = 0; held < HELD_STEPS; held++)
    #pragma unroll
    for (int l = 0; l < HELD_LINES; l++) {
      unsigned* const to = integers + (held * HELD_LINES + l) * 32;
      unsigned raw = to[lane];
      if (NORMED) {
        const Some<N, 2> plain = *(const Some<N, 2>*)&raw;
        if (warp + held * WARPS < STEPS)
          lengths_of[l] += up(plain.n[0]) * up(plain.n[0]) + up(plain.n[1]) * up(plain.n[1]);
        raw = product_pair(raw, gains[held * 32 + lane], N());
      }
      const Some<N, 2> two = *(const Some<N, 2>*)&raw;
      const float left = up(two.n[0]), right = up(two.n[1]);
      const unsigned size = max(__float_as_uint(fabsf(left)), __float_as_uint(fabsf(right)));
      const float most = __uint_as_float(__reduce_max_sync(0xffffffff, size));  // NaN stays NaN
      const float factor = most > 1e-30f ? MOST / most : 0.f, scale = most / MOST;
      const int a = __float2int_rn(left * factor), b = __float2int_rn(right * factor);
      const int sum = __reduce_add_sync(0xffffffff, a + b);
      const int low_sum = GROUPS == 1 ? sum : __reduce_add_sync(0xffffffff, lane < 16 ? a + b : 0);
      // Columns c, c + 8, c + 1, c + 9 are the bytes of a word. Two lanes have them; one of these keeps the high bytes.
      const unsigned low = a & 0xff | (b & 0xff) << 16;
      const unsigned high = (a + 128) >> 8 & 0xff | ((b + 128) >> 8 & 0xff) << 16;
      const bool later = lane & 4;
      const unsigned other = __shfl_xor_sync(0xffffffff, later ? high : low, 4);
      to[later * 16 + quarter * 4 + lane / 8] = later ? low << 8 | other : high | other << 8;
      float* const own_factors = factors + (held * HELD_LINES + l) * FACTORS;
      if (lane < GROUPS) own_factors[1 + lane] = scale * (lane == 0 ? low_sum : sum - low_sum);
      if (lane == 0) own_factors[0] = scale;
    }
  if (NORMED)
    #pragma unroll
    for (int l = 0; l < HELD_LINES; l++) {
      #pragma unroll
      for (int by = 1; by < 32; by *= 2) lengths_of[l] += __shfl_xor_sync(0xffffffff, lengths_of[l], by);
      if (lane == l * 4) squares[0] = lengths_of[l];
    }
}
__syncwarp();
// The offset of this lane's integers of a step: byte n % 2 of line n / 2.
const int integers_at = (line / 2 & HELD_LINES - 1) * 32 + line % 2 * 16 + quarter * 4;
const int own_line = quarter & HELD_LINES - 1;
unsigned here = 0;  // the stage of the next step
#pragma unroll 1
for (int strip = blockIdx.x; strip < strips; strip += gridDim.x) {
  const int first = strip * EACH;
  float sum[TILES][1][2] = {};
  #pragma unroll 1
  for (int step = warp, held = 0; step < STEPS; step += WARPS, held++) {
    fetch();
    wait_copies<STAGES - 1>();
    __syncwarp();
    unsigned b[4];
    float own[FACTORS];
    *(uint4*)b = *(const uint4*)(integers + held * HELD_LINES * 32 + integers_at);
    #pragma unroll
    for (int n = 0; n < 1 + GROUPS; n++) own[n] = factors[(held * HELD_LINES + own_line) * FACTORS + n];
    #pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
      unsigned words[4];
      *(uint4*)words = *(const uint4*)(stages + here + words_at + tile * FRAGMENT);
      #pragma unroll
      for (int group = 0; group < GROUPS; group++) {
        int some[4] = {};
        #pragma unroll
        for (int j = group * 2; j < (GROUPS == 1 ? 4 : group * 2 + 2); j += 2) {
          const unsigned a[4] = {words[j] & 0x0f0f0f0f, words[j] >> 4 & 0x0f0f0f0f,
                                 words[j + 1] & 0x0f0f0f0f, words[j + 1] >> 4 & 0x0f0f0f0f};
          mma_integers(some, a, b[j], b[j + 1]);
        }
        const Some<N, 4> its
            = *(const Some<N, 4>*)(stages + here + factors_at + tile * FRAGMENT + group * 8);
        #pragma unroll
        for (int half = 0; half < 2; half++) {
          const float value = (float)(some[2 * half] * 256 + some[2 * half + 1]) * own[0];
          sum[tile][0][half]
              = fmaf(up(its.n[half]), value, fmaf(up(its.n[2 + half]), own[1 + group], sum[tile][0][half]));
        }
      }
    }
    here = here == (STAGES - 1) * STAGE ? 0 : here + STAGE;
    __syncwarp();
  }
#include STRIP_END
}
wait_copies<0>();

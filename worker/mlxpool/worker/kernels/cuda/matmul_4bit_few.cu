// Products of up to 8 tokens ("lines") with an affine 4-bit weight in tiles (tiles_4bit.cuh), out [LINES, OUT] =
// x [LINES, IN] W [OUT, IN]^T, as fast as the weight can be read. The weight is divided into strips of 16 *
// FRAGMENTS rows, half of them gates if products are gated. Each thread block has every gridDim.x-th strip,
// and its warps multiply 64 columns of a strip each in turn; the copies of a warp run STAGES - 1 of its steps
// ahead, across strips, so the memory is busy also while the sums of a strip are added up (warp_sums.cuh).
// The weight is not dequantised: tensor cores multiply its integers plus OFFSET, exact in N, and each group's
// scale and bias are applied to the sums, with the sum of x over the group, which is a product with ones.
// NORMED: squares of x are products of the lines with themselves.
constexpr int SETS = 1, TILES = FRAGMENTS, THREADS = WARPS * 32, RUNS = GATED ? 2 : 1, LANE_LINES = 2, HELD_LINES = 8;
constexpr int EACH = 16 * FRAGMENTS / RUNS;  // results of a strip for a line
constexpr int RUN = FRAGMENTS / RUNS * FRAGMENT;  // bytes of neighbouring fragments
constexpr int LINES_AT = RUNS * RUN, GAIN_AT = LINES_AT + 8 * 128, STAGE = GAIN_AT + (NORMED ? 128 : 0);
const int LINES = x_shape[0], IN = x_shape[1], STEPS = IN / 64, OUT = weight_shape[0] * 64 / RUNS;
const int strips = OUT / EACH;
extern __shared__ uint4 space[];  // [WARPS][STAGES] stages, then the sums of the warps
const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, line = lane >> 2, quarter = lane & 3;
const char* const stages = (const char*)space + warp * STAGES * STAGE;
const unsigned base = shared_address(stages);
float* const found = (float*)((char*)space + WARPS * STAGES * STAGE);
const long apart = fragment_offset(OUT / 16, 0, STEPS);  // from gates to ups
// Offsets in a stage that this lane copies to and reads from; kept, as each step would compute them anew.
unsigned words_at = lane * 16, factors_at = 512 + line * GROUPS * 8;
const int swizzled = (lane % 8 ^ lane / 8) * 16;
unsigned line_at = LINES_AT + lane / 8 * 128 + swizzled, upper_at = LINES_AT + lane / 8 * 128 + 512 + (swizzled ^ 64);
unsigned left_at = LINES_AT + lane % 8 * 128 + swizzled, right_at = LINES_AT + lane % 8 * 128 + (swizzled ^ 64);
unsigned lines_here = max(LINES - lane / 8, 0);  // this lane copies the first and the fifth of them
hold(words_at);
hold(factors_at);
hold(line_at);
hold(upper_at);
hold(left_at);
hold(right_at);
hold(lines_here);
int ahead_strip = blockIdx.x, ahead_step = warp;
unsigned ahead = base;  // its stage
auto first_piece = [&] {
  return (const char*)weight + fragment_offset(ahead_strip * (EACH / 16), ahead_step, STEPS) + lane * 16;
};
const char* piece = first_piece();
const N* lines = (const N*)x + (long)(lane / 8) * IN + lane % 8 * 8 + warp * 64;
const N* gains_from = (const N*)gain + lane % 8 * 8 + warp * 64;
// Copies the next step of this warp.
auto fetch = [&] {
  if (ahead_step >= STEPS) {
    for (; ahead_step >= STEPS; ahead_step -= STEPS) {
      ahead_strip += gridDim.x;
      lines -= IN;
      if (NORMED) gains_from -= IN;
    }
    piece = first_piece();
  }
  if (ahead_strip < strips) {
    const unsigned to = ahead + words_at;
    #pragma unroll
    for (int run = 0; run < RUNS; run++)
      #pragma unroll
      for (int n = 0; n < (RUN / 16 + 31) / 32; n++)
        if (n * 512 + words_at < RUN) copy(to + run * RUN + n * 512, piece + run * apart + n * 512);
    if (lines_here > 0) copy_bytes<16>(ahead + line_at, lines);
    if (lines_here > 4) copy_bytes<16>(ahead + upper_at, lines + 4 * (long)IN);
    if (NORMED && words_at < 128) copy_bytes<16>(to + GAIN_AT, gains_from);
  }
  commit_copies();
  ahead_step += WARPS;
  piece += WARPS * 4 * FRAGMENT;
  lines += WARPS * 64;
  if (NORMED) gains_from += WARPS * 64;
  ahead = ahead == base + (STAGES - 1) * STAGE ? base : ahead + STAGE;
};
#pragma unroll 1
for (int n = 0; n < STAGES - 1; n++) fetch();
const unsigned ones[4] = {Raised<N>::ONES, Raised<N>::ONES, Raised<N>::ONES, Raised<N>::ONES};
const unsigned held = held_pair<N>(x_shape[0]);
int step = warp;
unsigned here = 0;  // the stage of that step
#pragma unroll 1
for (int strip = blockIdx.x; strip < strips; strip += gridDim.x) {
  const int first = strip * EACH;
  float sum[TILES][1][4] = {}, lengths_of[4] = {};
  #pragma unroll 1
  for (; step < STEPS; step += WARPS) {
    fetch();
    wait_copies<STAGES - 1>();
    __syncwarp();
    unsigned b[2][4];
    #pragma unroll
    for (int half = 0; half < 2; half++) {
      load_matrices(b[half], base + here + (half ? right_at : left_at));
      if (NORMED) {
        unsigned gains[4];
        load_matrices(gains, base + here + GAIN_AT + (lane / 8 + half * 4) * 16);
        #pragma unroll
        for (int i = 0; i < 4; i += 2) {
          const unsigned a[4] = {b[half][i], 0, b[half][i + 1], 0};
          mma(lengths_of, a, b[half][i], b[half][i + 1], N());
        }
        #pragma unroll
        for (int i = 0; i < 4; i++) b[half][i] = product_pair(b[half][i], gains[i], N());
      }
    }
    unsigned words[TILES][4];
    #pragma unroll
    for (int tile = 0; tile < TILES; tile++)
      *(uint4*)words[tile] = *(const uint4*)(stages + here + words_at + tile * FRAGMENT);
    #pragma unroll
    for (int group = 0; group < GROUPS; group++) {
      float x_sum[4] = {}, some[TILES][4] = {};
      #pragma unroll
      for (int j = group * 4 / GROUPS; j < (group + 1) * 4 / GROUPS; j++) {
        const unsigned left = b[j / 2][j % 2 * 2], right = b[j / 2][j % 2 * 2 + 1];
        mma(x_sum, ones, left, right, N());
        #pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
          unsigned a[4];
          #pragma unroll
          for (int p = 0; p < 4; p++) a[p] = raised(words[tile][j], p, held);
          mma(some[tile], a, left, right, N());
        }
      }
      #pragma unroll
      for (int tile = 0; tile < TILES; tile++) {
        const Some<N, 4> factors
            = *(const Some<N, 4>*)(stages + here + factors_at + tile * FRAGMENT + group * 8);
        #pragma unroll
        for (int half = 0; half < 2; half++) {
          const float scale = up(factors.n[half]);
          const float shift = fmaf(-Raised<N>::OFFSET, scale, up(factors.n[2 + half]));
          #pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; i++)
            sum[tile][0][i] = fmaf(scale, some[tile][i], fmaf(shift, x_sum[i % 2], sum[tile][0][i]));
        }
      }
    }
    here = here == (STAGES - 1) * STAGE ? 0 : here + STAGE;
    __syncwarp();
  }
  step -= STEPS;
  // Each length is on the diagonal, in one of four lanes.
  float squares[1] = {line / 2 == quarter ? line % 2 ? lengths_of[1] : lengths_of[0] : 0.f};
#include STRIP_END
}
wait_copies<0>();

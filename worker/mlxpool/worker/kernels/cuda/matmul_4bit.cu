// Products of few tokens ("lines") with an affine 4-bit weight, out [LINES, OUT] = x [LINES, IN]
// W [OUT, IN]^T, as in matmul_small.cu: a weight is read once and dequantised in registers. A thread
// block has TILES * 16 rows of the weight, half of them gates if products are gated; its warps
// multiply 128 columns each in turn and add up their sums. A thread reads 32 numbers of a row at a
// time. A word has eight; the first pairs with the fifth and so on, in both operands.
constexpr int COLUMNS = WARPS * 128, THREADS = WARPS * 32, LANE_LINES = 2, HELD_LINES = SETS * 8;
constexpr int EACH = GATED ? TILES * 8 : TILES * 16;  // results of a thread block for a line
constexpr int SCALES = 128 / GROUP;  // of a row in a warp's columns
const int LINES = x_shape[0], IN = x_shape[1], OUT = weight_shape[0] / (GATED ? 2 : 1);
extern __shared__ uint4 space[];  // [STAGES][TILES * 2][THREADS] words, then scales, or sums
N* const all_scales = (N*)(space + STAGES * TILES * 2 * THREADS);
const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, line = lane >> 2, quarter = lane & 3;
const int first = blockIdx.x * EACH;
auto row_of = [&](int tile) -> long {
  return GATED && tile >= TILES / 2 ? (long)OUT + first + (tile - TILES / 2) * 16 : first + tile * 16;
};
auto scales_at = [&](int step, int tile) -> N* {  // [2][16][SCALES]: scales and biases
  return all_scales + ((step % STAGES * WARPS + warp) * TILES + tile) * 32 * SCALES;
};
auto fetch = [&](int step) {
  if (step < IN / COLUMNS) {
    const long some = (long)step * WARPS + warp;
    #pragma unroll
    for (int i = 0; i < TILES * 2; i++)
      copy(shared_address(space + (step % STAGES * TILES * 2 + i) * THREADS + threadIdx.x),
           (const char*)weight + (row_of(i / 2) + line + i % 2 * 8) * (IN / 2) + some * 64
               + quarter * 16);
    #pragma unroll
    for (int tile = 0; tile < TILES; tile++)
      copy_bytes<SCALES * 2>(shared_address(scales_at(step, tile) + lane * SCALES),
                           (lane < 16 ? scales : biases)
                               + (row_of(tile) + lane % 16) * (IN / GROUP) + some * SCALES);
  }
  commit_copies();
};
float sum[TILES][SETS][4] = {};
#pragma unroll
for (int step = 0; step < STAGES - 1; step++) fetch(step);
const N* const lines = (const N*)x + warp * 128 + quarter * 32;
uint4 b[SETS][4], next[SETS][4], gains[4];
float squares[SETS] = {};
auto ask = [&](int step) {
  #pragma unroll
  for (int set = 0; set < SETS; set++)
    #pragma unroll
    for (int j = 0; j < 4; j++)
      next[set][j] = *(const uint4*)(lines + (long)min(set * 8 + line, LINES - 1) * IN
                                     + step * COLUMNS + j * 8);
  if (NORMED)
    #pragma unroll
    for (int j = 0; j < 4; j++)
      gains[j] = *(const uint4*)((const N*)gain + warp * 128 + quarter * 32 + step * COLUMNS + j * 8);
};
ask(0);
#pragma unroll 1
for (int step = 0; step < IN / COLUMNS; step++) {
  fetch(step + STAGES - 1);
  #pragma unroll
  for (int set = 0; set < SETS; set++)
    #pragma unroll
    for (int j = 0; j < 4; j++) {
      const uint4 some
          = NORMED ? weighed(next[set][j], gains[j], squares[set], N()) : next[set][j];
      b[set][j] = {__byte_perm(some.x, some.z, 0x5410), __byte_perm(some.x, some.z, 0x7632),
                   __byte_perm(some.y, some.w, 0x5410), __byte_perm(some.y, some.w, 0x7632)};
    }
  ask(min(step + 1, IN / COLUMNS - 1));
  wait_copies<STAGES - 1>();
  __syncwarp();
  #pragma unroll
  for (int tile = 0; tile < TILES; tile++) {
    const uint4* from = space + (step % STAGES * TILES + tile) * 2 * THREADS + threadIdx.x;
    const uint4 low4 = from[0], high4 = from[THREADS];
    const unsigned low[4] = {low4.x, low4.y, low4.z, low4.w};
    const unsigned high[4] = {high4.x, high4.y, high4.z, high4.w};
    const N* const factors = scales_at(step, tile) + line * SCALES + quarter * 32 / GROUP;
    const auto low_scale = both_halves(factors[0]), high_scale = both_halves(factors[8 * SCALES]);
    const auto low_bias = both_halves(factors[16 * SCALES]), high_bias = both_halves(factors[24 * SCALES]);
    #pragma unroll
    for (int j = 0; j < 4; j++) {
      unsigned a[2][4];
      #pragma unroll
      for (int p = 0; p < 4; p++) {
        a[p / 2][p % 2 * 2] = dequantised_pair(low[j] >> 4 * p, low_scale, low_bias);
        a[p / 2][p % 2 * 2 + 1] = dequantised_pair(high[j] >> 4 * p, high_scale, high_bias);
      }
      #pragma unroll
      for (int set = 0; set < SETS; set++) {
        mma(sum[tile][set], a[0], b[set][j].x, b[set][j].y, N());
        mma(sum[tile][set], a[1], b[set][j].z, b[set][j].w, N());
      }
    }
  }
  __syncwarp();
}
wait_copies<0>();
float* const found = (float*)space;

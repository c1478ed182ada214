// Products of few lines with an affine weight of 4 bits, out [LINES, OUT] = x [LINES, IN] numbers
// [OUT, IN]^T, as matmul_small.cu has them: a weight is read once and becomes numbers in registers. A
// thread block has TILES * 16 of its rows, half of them gates where products are gated; its warps take
// 128 columns each in turn and add up what they found. A thread reads 32 numbers of a row at a time.
// In one word lie eight; the first goes with the fifth and so on, on both sides of the product.
constexpr int COLUMNS = WARPS * 128, THREADS = WARPS * 32;
constexpr int EACH = GATED ? TILES * 8 : TILES * 16;  // numbers of a line out of a thread block
constexpr int SCALES = 128 / GROUP;  // of a row and a warp's columns
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
      copy(shared_at(space + (step % STAGES * TILES * 2 + i) * THREADS + threadIdx.x),
           (const char*)weight + (row_of(i / 2) + line + i % 2 * 8) * (IN / 2) + some * 64
               + quarter * 16);
    #pragma unroll
    for (int tile = 0; tile < TILES; tile++)
      copy_few<SCALES * 2>(shared_at(scales_at(step, tile) + lane * SCALES),
                           (lane < 16 ? scales : biases)
                               + (row_of(tile) + lane % 16) * (IN / GROUP) + some * SCALES);
  }
  copies_asked();
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
  copies_arrived_but<STAGES - 1>();
  __syncwarp();
  #pragma unroll
  for (int tile = 0; tile < TILES; tile++) {
    const uint4* from = space + (step % STAGES * TILES + tile) * 2 * THREADS + threadIdx.x;
    const uint4 low4 = from[0], high4 = from[THREADS];
    const unsigned low[4] = {low4.x, low4.y, low4.z, low4.w};
    const unsigned high[4] = {high4.x, high4.y, high4.z, high4.w};
    const N* const factors = scales_at(step, tile) + line * SCALES + quarter * 32 / GROUP;
    const auto low_scale = twice(factors[0]), high_scale = twice(factors[8 * SCALES]);
    const auto low_bias = twice(factors[16 * SCALES]), high_bias = twice(factors[24 * SCALES]);
    #pragma unroll
    for (int j = 0; j < 4; j++) {
      unsigned a[2][4];
      #pragma unroll
      for (int p = 0; p < 4; p++) {
        a[p / 2][p % 2 * 2] = fours(low[j] >> 4 * p, low_scale, low_bias);
        a[p / 2][p % 2 * 2 + 1] = fours(high[j] >> 4 * p, high_scale, high_bias);
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
copies_arrived_but<0>();

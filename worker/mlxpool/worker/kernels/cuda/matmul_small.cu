// Products of few lines with a weight, out [LINES, OUT] = x [LINES, IN] weight [OUT, IN]^T: as fast
// as the weight can be read. A thread block has 16 of its rows, or 16 pairs of rows where their
// products are gated; its warps take 32 columns each in turn and add up what they found. Weights are
// the first matrix of the tensor cores, lines the second; which column stands where in both is free,
// so that a thread reads numbers that lie side by side (see paged_attention.cu). What it reads of the weight
// comes through shared memory, STAGES columns ahead, and is read by itself alone. NORMED: of x its norm
// is multiplied; numbers are weighed with `gain` here, and what a line is divided by is known at the
// end (warp_sums.cuh), where what is ADDED comes in, too.
constexpr int TILES = GATED ? 2 : 1, COLUMNS = WARPS * 32;
constexpr int THREADS = WARPS * 32, EACH = 16;
const int LINES = x_shape[0], IN = x_shape[1], OUT = weight_shape[0] / TILES;
extern __shared__ uint4 space[];  // [STAGES][TILES * 2][THREADS], then the warps' sums
const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, line = lane >> 2, quarter = lane & 3;
const long first = (long)blockIdx.x * 16;
float sum[TILES][SETS][4] = {};
const N* const rows = (const N*)weight + (first + line) * IN + warp * 32 + quarter * 8;
auto fetch = [&](int step) {
  if (step < IN / COLUMNS)
    #pragma unroll
    for (int i = 0; i < TILES * 2; i++)
      copy(shared_at(space + (step % STAGES * TILES * 2 + i) * THREADS + threadIdx.x),
           rows + ((long)(i / 2) * OUT + i % 2 * 8) * IN + step * COLUMNS);
  copies_asked();
};
#pragma unroll
for (int step = 0; step < STAGES - 1; step++) fetch(step);
const N* const lines = (const N*)x + warp * 32 + quarter * 8;
uint4 b[SETS], next[SETS], gains;
float squares[SETS] = {};  // of what this thread reads of a line
auto ask = [&](int step) {
  #pragma unroll
  for (int set = 0; set < SETS; set++)
    next[set] = *(const uint4*)(lines + (long)min(set * 8 + line, LINES - 1) * IN + step * COLUMNS);
  if (NORMED) gains = *(const uint4*)((const N*)gain + warp * 32 + quarter * 8 + step * COLUMNS);
};
ask(0);
#pragma unroll 2
for (int step = 0; step < IN / COLUMNS; step++) {
  fetch(step + STAGES - 1);
  #pragma unroll
  for (int set = 0; set < SETS; set++)
    b[set] = NORMED ? weighed(next[set], gains, squares[set], N()) : next[set];
  ask(min(step + 1, IN / COLUMNS - 1));
  copies_arrived_but<STAGES - 1>();
  #pragma unroll
  for (int tile = 0; tile < TILES; tile++) {
    const uint4* from = space + (step % STAGES * TILES + tile) * 2 * THREADS + threadIdx.x;
    const uint4 low = from[0], high = from[THREADS];
    const unsigned one[4] = {low.x, high.x, low.y, high.y};
    const unsigned two[4] = {low.z, high.z, low.w, high.w};
    #pragma unroll
    for (int set = 0; set < SETS; set++) {
      mma(sum[tile][set], one, b[set].x, b[set].y, N());
      mma(sum[tile][set], two, b[set].z, b[set].w, N());
    }
  }
}

// Products of few tokens ("lines") with a weight, out [LINES, OUT] = x [LINES, IN] weight [OUT, IN]^T,
// as fast as the weight can be read. A thread block has 16 rows of the weight, or 16 pairs of rows
// if products are gated; its warps multiply 32 columns each in turn and add up their sums. The
// weight is the first operand of the tensor cores, the lines are the second; the order of columns is
// free as long as both agree, so a thread reads neighbouring numbers. It
// copies its part of the weight through shared memory, STAGES steps ahead, and only it reads that part.
// NORMED: the norm of x is multiplied; x is multiplied by `gain` here and divided by its RMS at the end
// (warp_sums.cuh). ADDED: `beside` is added there, too.
constexpr int TILES = GATED ? 2 : 1, COLUMNS = WARPS * 32;
constexpr int THREADS = WARPS * 32, EACH = 16, LANE_LINES = 2, HELD_LINES = SETS * 8;
const int LINES = x_shape[0], IN = x_shape[1], OUT = weight_shape[0] / TILES;
extern __shared__ uint4 space[];  // [STAGES][TILES * 2][THREADS], later the sums of the warps
const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, line = lane >> 2, quarter = lane & 3;
const long first = (long)blockIdx.x * 16;
float sum[TILES][SETS][4] = {};
const N* const rows = (const N*)weight + (first + line) * IN + warp * 32 + quarter * 8;
auto fetch = [&](int step) {
  if (step < IN / COLUMNS)
    #pragma unroll
    for (int i = 0; i < TILES * 2; i++)
      copy(shared_address(space + (step % STAGES * TILES * 2 + i) * THREADS + threadIdx.x),
           rows + ((long)(i / 2) * OUT + i % 2 * 8) * IN + step * COLUMNS);
  commit_copies();
};
#pragma unroll
for (int step = 0; step < STAGES - 1; step++) fetch(step);
const N* const lines = (const N*)x + warp * 32 + quarter * 8;
uint4 b[SETS], next[SETS], gains;
float squares[SETS] = {};  // sums of the squares that this thread reads of a line
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
  wait_copies<STAGES - 1>();
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
float* const found = (float*)space;

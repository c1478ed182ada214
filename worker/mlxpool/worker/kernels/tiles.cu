// Products of some lines with a weight, out [LINES, OUT] = x [LINES, IN] weight [OUT, IN]^T. A thread
// block has ROWS rows of the weight, half of them gates where products are gated, and all lines; both
// come through shared memory in pieces of 32 columns, SUBS pieces at a time, STAGES - 1 times ahead.
// Its warps share rows, lines and pieces among themselves. A row of a piece is 64 bytes, of which a
// thread reads 16 at once, without conflicts: which column stands where in the matrices is free.
constexpr int WARPS = ROW_WARPS * LINE_WARPS * PIECE_WARPS, THREADS = WARPS * 32;
constexpr int TILES = ROWS / 16 / ROW_WARPS;
constexpr int OWN = (SETS + LINE_WARPS - 1) / LINE_WARPS;  // sets of lines of a warp
constexpr int ALL = OWN * LINE_WARPS * 8;  // lines, and some that are nobody's
constexpr int COLUMNS = SUBS * 32, STAGE = (ROWS + ALL) * SUBS * 4;
const int LINES = x_shape[0], IN = x_shape[1], OUT = weight_shape[0] / (GATED ? 2 : 1);
const int STEPS = IN / COLUMNS;
extern __shared__ uint4 space[];  // [STAGES][STAGE], then sums
const int lane = threadIdx.x & 31, line = lane >> 2, quarter = lane & 3, warp = threadIdx.x >> 5;
const int piece = warp % PIECE_WARPS, part = warp / PIECE_WARPS % LINE_WARPS;
const int rows = warp / PIECE_WARPS / LINE_WARPS;
constexpr int EACH = GATED ? ROWS / 2 : ROWS;  // numbers that come out of a thread block for a line
const int first = blockIdx.x * EACH;
auto copy = [](uint4* to, const N* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(
                   (unsigned)__cvta_generic_to_shared(to)), "l"(from));
};
auto fetch = [&](int step) {
  if (step < STEPS) {
    uint4* const to = space + step % STAGES * STAGE;
    #pragma unroll
    for (int n = 0; n < (ROWS * SUBS * 4 + THREADS - 1) / THREADS; n++) {
      const int i = n * THREADS + threadIdx.x, row = i / (SUBS * 4), column = i % (SUBS * 4);
      if (i < ROWS * SUBS * 4) {
        const long from = GATED && row >= EACH ? (long)OUT + first + row - EACH : first + row;
        copy(to + (column / 4 * ROWS + row) * 4 + column % 4,
             (const N*)weight + from * IN + step * COLUMNS + column * 8);
      }
    }
    #pragma unroll
    for (int n = 0; n < (ALL * SUBS * 4 + THREADS - 1) / THREADS; n++) {
      const int i = n * THREADS + threadIdx.x, row = i / (SUBS * 4), column = i % (SUBS * 4);
      if (i < ALL * SUBS * 4)
        copy(to + ROWS * SUBS * 4 + (column / 4 * ALL + row) * 4 + column % 4,
             (const N*)x + (long)min(row, LINES - 1) * IN + step * COLUMNS + column * 8);
    }
  }
  asm volatile("cp.async.commit_group;");
};
float sum[TILES][OWN][4];
#pragma unroll
for (int tile = 0; tile < TILES; tile++)
  #pragma unroll
  for (int set = 0; set < OWN; set++)
    sum[tile][set][0] = sum[tile][set][1] = sum[tile][set][2] = sum[tile][set][3] = 0;
#pragma unroll
for (int step = 0; step < STAGES - 1; step++) fetch(step);
for (int step = 0; step < STEPS; step++) {
  asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
  __syncthreads();
  fetch(step + STAGES - 1);
  const uint4* const here = space + step % STAGES * STAGE;
  #pragma unroll
  for (int sub = piece; sub < SUBS; sub += PIECE_WARPS) {
    uint4 b[OWN];
    #pragma unroll
    for (int set = 0; set < OWN; set++)
      b[set] = here[ROWS * SUBS * 4 + (sub * ALL + (part * OWN + set) * 8 + line) * 4 + quarter];
    #pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
      const int row = (rows * TILES + tile) * 16 + line;
      const uint4 low = here[(sub * ROWS + row) * 4 + quarter];
      const uint4 high = here[(sub * ROWS + row + 8) * 4 + quarter];
      const unsigned one[4] = {low.x, high.x, low.y, high.y};
      const unsigned two[4] = {low.z, high.z, low.w, high.w};
      #pragma unroll
      for (int set = 0; set < OWN; set++) {
        mma(sum[tile][set], one, b[set].x, b[set].y, N());
        mma(sum[tile][set], two, b[set].z, b[set].w, N());
      }
    }
  }
}
asm volatile("cp.async.wait_group 0;" ::: "memory");
__syncthreads();
float* const found = (float*)space;  // [PIECE_WARPS][ALL][ROWS + 1]
#pragma unroll
for (int tile = 0; tile < TILES; tile++)
  #pragma unroll
  for (int set = 0; set < OWN; set++)
    #pragma unroll
    for (int i = 0; i < 4; i++) {
      const int l = (part * OWN + set) * 8 + quarter * 2 + i % 2;
      const int row = (rows * TILES + tile) * 16 + line + i / 2 * 8;
      found[(piece * ALL + l) * (ROWS + 1) + row] = sum[tile][set][i];
    }
__syncthreads();
for (int i = threadIdx.x; i < LINES * EACH; i += THREADS) {
  const int row = i % EACH, l = i / EACH;
  float one = 0, other = 0;
  #pragma unroll
  for (int p = 0; p < PIECE_WARPS; p++) {
    one += found[(p * ALL + l) * (ROWS + 1) + row];
    if (GATED) other += found[(p * ALL + l) * (ROWS + 1) + EACH + row];
  }
  down(GATED ? gated(one, other, N()) : one, (N*)out + (long)l * OUT + first + row);
}

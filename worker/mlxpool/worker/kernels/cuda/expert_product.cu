// Products of lines with the weights [EXPERTS, _, IN] of the experts that they have chosen, by the items of
// `plan` (expert_routing.cu): x [LINES, IN] -> out [choices by expert, OUT], silu(gate) * up, where GATED;
// otherwise x [choices by expert, IN] -> out [choices, OUT]. SHARED: every line is also an item's, of
// the expert that has a weight of its own.
// A thread block takes items' tiles of 128 rows in turn, each with all lines of an item, which are up to
// 8 * SETS. Both operands come through shared memory as in tiled_product.cuh, STAGES - 2 steps of 64 columns
// ahead, also across tiles. A gated tile alternates eight gates with the eight others that belong to
// them, so that a thread has the sums of both.
constexpr int ROWS = 128, ALL = 8 * SETS, THREADS = 256, STAGE = (ROWS + ALL) * 128;
constexpr int EACH = GATED ? ROWS / 2 : ROWS;  // results of a tile for a line
constexpr int WEIGHT_COPIES = ROWS * 8 / THREADS, LINE_COPIES = (ALL * 8 + THREADS - 1) / THREADS;
const int IN = x_shape[1], OUT = weight_shape[1] / (GATED ? 2 : 1);
const int lines = x_shape[0] / (GATED ? 1 : CHOSEN + SHARED), choices = lines * CHOSEN;
const int tiles = (OUT + EACH - 1) / EACH, steps = IN / 64;
const int* const sorted = (const int*)plan + 4 + 2 * choices;
const int* const items = (const int*)plan + (5 + 3 * choices + SHARED * lines) / 2 * 2;
const int units = *(const int*)plan * tiles;  // tiles of items; this block has each gridDim.x-th
extern __shared__ uint4 space[];
__shared__ int targets[2][ALL];  // rows of `out`, of this unit and the one before
const unsigned base = (shared_address(space) + 1023) & ~1023u;
const int thread = threadIdx.x, piece = thread % 8, row = thread / 8;
const unsigned into = row * 128 + (piece ^ row % 8) * 16;
const N* from;  // the weight of the expert whose tile is copied
int weight_at[WEIGHT_COPIES], line_at[LINE_COPIES];  // where this thread copies from, line_at < 0: nothing
auto open = [&](int unit) {
  const int* const item = items + unit / tiles * 2;
  const int expert = item[0] & 0xffff, count = item[0] >> 16, first = unit % tiles * EACH;
  from = SHARED && expert == EXPERTS ? (const N*)shared_weight
                                     : (const N*)weight + (long)expert * weight_shape[1] * IN;
  #pragma unroll
  for (int n = 0; n < WEIGHT_COPIES; n++) {
    const int at = GATED ? n * 16 + row / 16 * 8 + row % 8 : n * 32 + row;
    const int beside = GATED && row % 16 >= 8 ? OUT : 0;
    weight_at[n] = (min(first + at, OUT - 1) + beside) * IN + piece * 8;
  }
  #pragma unroll
  for (int n = 0; n < LINE_COPIES; n++) {
    const int line = n * 32 + row;
    line_at[n] = -1;
    if (line < count) {
      int whose = item[1] + line;
      if (GATED) {
        whose = sorted[whose];
        whose = whose < choices ? whose / CHOSEN : whose - choices;
      }
      line_at[n] = whose * IN + piece * 8;
    }
  }
};
int ahead_unit = blockIdx.x, ahead_step = 0;
unsigned ahead_at = base;  // of the stage that is copied next
auto fetch = [&]() {
  if (ahead_unit < units) {
    if (ahead_step == 0) open(ahead_unit);
    #pragma unroll
    for (int n = 0; n < WEIGHT_COPIES; n++)
      copy(ahead_at + into + n * 4096, from + weight_at[n] + ahead_step * 64);
    #pragma unroll
    for (int n = 0; n < LINE_COPIES; n++)
      if (line_at[n] >= 0)
        copy(ahead_at + into + (ROWS * 128 + n * 4096), (const N*)x + line_at[n] + ahead_step * 64);
    if (++ahead_step == steps) {
      ahead_step = 0;
      ahead_unit += gridDim.x;
    }
  }
  commit_copies();
  ahead_at = ahead_at == base + (STAGES - 1) * STAGE ? base : ahead_at + STAGE;
};
// The descriptor of a matrix: swizzled rows of 128 bytes, eight rows in 1,024 bytes.
auto matrix = [](unsigned at) -> unsigned long long {
  return (unsigned long long)((at & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
};
#pragma unroll 1
for (int i = 0; i < STAGES - 2; i++) fetch();
unsigned at = base;  // of the stage that is multiplied next
int parity = 0;
#pragma unroll 1
for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
  const int* const item = items + unit / tiles * 2;
  const int count = item[0] >> 16;
  if (thread < count) targets[parity][thread] = GATED ? item[1] + thread : sorted[item[1] + thread];
  float sum[4 * SETS];
  #pragma unroll
  for (int i = 0; i < 4 * SETS; i++) sum[i] = 0;
  #pragma unroll 1
  for (int step = 0; step < steps; step++) {
    wait_copies<STAGES - 3>();
    fence_products();
    __syncthreads();  // all threads have multiplied what the next columns overwrite
    fetch();
    begin_products();
    const unsigned long long rows = matrix(at + thread / 128 * 8192);
    const unsigned long long columns = matrix(at + ROWS * 128);
    #pragma unroll
    for (int k = 0; k < 4; k++) group_mma(sum, rows + 2 * k, columns + 2 * k);
    commit_products();
    wait_products<1>();
    at = at == base + (STAGES - 1) * STAGE ? base : at + STAGE;
  }
  wait_products<0>();
  hold(sum);
  const int one = unit % tiles * EACH + thread / 32 * (EACH / 8) + thread % 32 / 4;
  #pragma unroll
  for (int i = 0; i < 4 * SETS; i++) {
    const int line = i / 4 * 8 + thread % 4 * 2 + i % 2, to = one + i % 4 / 2 * 8;
    if (GATED && i % 4 >= 2) continue;
    if (line < count && to < OUT)
      down(GATED ? gated(sum[i], sum[i + 2], N()) : sum[i],
           (N*)out + (long)targets[parity][line] * OUT + to);
  }
  parity ^= 1;
}
wait_copies<0>();

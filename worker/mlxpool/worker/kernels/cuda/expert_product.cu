// Products with experts' weights of 16 bits, see expert_items.cuh. Both operands come through shared memory as in
// tiled_product.cuh, STAGES - 2 steps of 64 columns ahead, also across tiles. The shared expert has its own
// weight.
constexpr int ROWS = 128, THREADS = 256;
const int WEIGHT_ROWS = weight_shape[1];
#include EXPERT_ITEMS
__shared__ int targets[2][ALL];  // rows of `out`, of this unit and the one before
// Notes the rows of `out` of an item's lines. A barrier follows before its results are written.
auto note_targets = [&](const int* item, int parity) {
  if (thread < item[0] >> 16) targets[parity][thread] = target_of(item, thread);
};
// The row of an expert's weight that is row `at` of a tile; rows after the last repeat it.
auto row_of = [&](int unit, int at) -> int {
  const int first = unit % tiles * EACH;
  if (!GATED) return min(first + at, OUT - 1);
  return min(first + at / 16 * 8 + at % 8, OUT - 1) + (at % 16 >= 8 ? OUT : 0);
};
constexpr int STAGE = (ROWS + ALL) * 128;
constexpr int WEIGHT_COPIES = ROWS * 8 / THREADS, LINE_COPIES = (ALL * 8 + THREADS - 1) / THREADS;
const int IN = x_shape[1], steps = IN / 64;
const int piece = thread % 8, row = thread / 8;
const unsigned into = row * 128 + (piece ^ row % 8) * 16;
const N* from;  // the weight of the expert whose tile is copied
int weight_at[WEIGHT_COPIES], line_at[LINE_COPIES];  // sources of this thread's copies; line_at < 0: no copy
auto open = [&](int unit) {
  const int* const item = items + unit / tiles * 2;
  const int expert = item[0] & 0xffff, count = item[0] >> 16;
  from = SHARED && expert == EXPERTS ? (const N*)shared_weight
                                     : (const N*)weight + (long)expert * weight_shape[1] * IN;
  #pragma unroll
  for (int n = 0; n < WEIGHT_COPIES; n++)
    weight_at[n] = row_of(unit, n * 32 + row) * IN + piece * 8;
  #pragma unroll
  for (int n = 0; n < LINE_COPIES; n++)
    line_at[n] = n * 32 + row < count ? source_of(item, n * 32 + row) * IN + piece * 8 : -1;
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
#pragma unroll 1
for (int i = 0; i < STAGES - 2; i++) fetch();
unsigned at = base;  // of the stage that is multiplied next
int parity = 0;
#pragma unroll 1
for (int unit = blockIdx.x; unit < units; unit += gridDim.x, parity ^= 1) {
  const int* const item = items + unit / tiles * 2;
  note_targets(item, parity);
  float sum[4 * SETS];
  #pragma unroll
  for (int i = 0; i < 4 * SETS; i++) sum[i] = 0;
  #pragma unroll 1
  for (int step = 0; step < steps; step++) {
    wait_copies<STAGES - 3>();
    fence_products();
    __syncthreads();  // all threads have multiplied the columns that the next ones overwrite
    fetch();
    begin_products();
    const unsigned long long rows = matrix_at(at + thread / 128 * 8192);
    const unsigned long long columns = matrix_at(at + ROWS * 128);
    #pragma unroll
    for (int k = 0; k < 4; k++) group_mma(sum, rows + 2 * k, columns + 2 * k);
    commit_products();
    wait_products<1>();
    at = at == base + (STAGES - 1) * STAGE ? base : at + STAGE;
  }
  wait_products<0>();
  hold(sum);
  store_results(sum, unit % tiles * EACH + thread / 32 * (EACH / 8) + thread % 32 / 4, item,
                [&](int line) { return targets[parity][line]; });
}
wait_copies<0>();

// Products of some lines with quantised weights of experts, see expert_items.cuh, in fragments of their rows
// (expert_fragments.cuh). A row has STEPS fragments. Each warp multiplies a strip of 16 rows of a unit. It reads the
// fragments of its strip into registers, DEEP fragments ahead, also across units, and dequantises a fragment in
// registers as the first operand of four products. Lines come through shared memory, STAGES - 2 stages ahead; a stage
// has the columns of WIDE fragments, a multiple of DEEP. SETS is a power of two.
// expert_items.cuh also reads x_shape and weight_shape.
constexpr int THREADS = 2 * ROWS;
const int STRIPS = weight_shape[1], WEIGHT_ROWS = STRIPS * 16;
#include EXPERT_ITEMS
__shared__ int targets[2][ALL];  // rows of `out`, of this unit and the one before
// Notes the rows of `out` of an item's lines. A barrier follows before its results are written.
auto note_targets = [&](const int* item, int parity) {
  if (thread < item[0] >> 16) targets[parity][thread] = target_of(item, thread);
};
constexpr int IN = STEPS * 64, REST = STEPS % WIDE, steps = (STEPS + WIDE - 1) / WIDE;  // REST: of the last stage; 0: all
constexpr int HALF = ALL * 128, LINES = WIDE * HALF;  // bytes of 64 columns, and of a stage
constexpr int THREADS_PER_LINE = THREADS / ALL, CHUNKS = (8 * WIDE + THREADS_PER_LINE - 1) / THREADS_PER_LINE;
const int lane = thread % 32, line = thread / THREADS_PER_LINE, chunk = thread % THREADS_PER_LINE;  // of 8 columns
// The copies of the next stage: whether this thread copies, from where, and to where.
bool copies = false;
const N* line_from = (const N*)x;
unsigned lines_to = base + chunk / 8 * HALF + line * 128 + ((chunk ^ line) & 7) * 16;
int ahead_unit = blockIdx.x, left = 0, ahead = 0;  // the unit that is copied, its stages that are left, the next stage
auto fetch = [&]() {
  if (ahead_unit < units) {
    if (left == 0) {
      const int* const item = items + ahead_unit / tiles * 2;
      copies = line < item[0] >> 16;
      line_from = (const N*)x + (long)source_of(item, copies ? line : 0) * IN + chunk * 8;
      left = steps;
    }
    if (copies) {
      #pragma unroll
      for (int n = 0; n < CHUNKS; n++) {
        const int before = n * THREADS_PER_LINE;  // chunks; the xor is the swizzle of `chunk + before`
        if (before + chunk < 8 * (REST && left == 1 ? REST : WIDE))
          copy((lines_to ^ before % 8 * 16) + before / 8 * HALF, line_from + before * 8);
      }
    }
    line_from += 64 * WIDE;
    if (--left == 0) ahead_unit += gridDim.x;
  }
  commit_copies();
  const bool last = ahead == STAGES - 1;
  ahead = last ? 0 : ahead + 1;
  lines_to += LINES - (last ? STAGES * LINES : 0);
};
#pragma unroll 1
for (int i = 0; i < STAGES - 2; i++) fetch();
const int factors_at = WORDS + lane / 4 * FACTORS - lane * 16;
auto strip_of = [&](int unit) -> const char* {
  const long expert = items[unit / tiles * 2] & 0xffff;
  const int strip = min(unit % tiles * (ROWS / 16) + thread / 32, STRIPS - 1);
  return (const char*)weight + (expert * STRIPS + strip) * (STEPS * FRAGMENT) + lane * 16;
};
Fragment fragments[DEEP];
auto load = [&](int n, const char* from) {
  #pragma unroll
  for (int i = 0; i < BITS / 4; i++) load_once(fragments[n].words[i], from + i * 512);
  load_once(fragments[n].factors, from + factors_at);
};
if (blockIdx.x < units) {
  const char* const from = strip_of(blockIdx.x);
  #pragma unroll
  for (int n = 0; n < DEEP; n++) load(n, from + min(n, STEPS - 1) * FRAGMENT);
}
int stage = 0, parity = 0;
const unsigned held = held_pair<N>(x_shape[0]);
#pragma unroll 1
for (int unit = blockIdx.x; unit < units; unit += gridDim.x, parity ^= 1) {
  const int* const item = items + unit / tiles * 2;
  note_targets(item, parity);
  const char* from = strip_of(unit);
  const char* const next = unit + (int)gridDim.x < units ? strip_of(unit + gridDim.x) : from;
  float sum[4 * SETS];
  #pragma unroll
  for (int i = 0; i < 4 * SETS; i++) sum[i] = 0;
  #pragma unroll 1
  for (int step = steps; step > 0; step--) {
    wait_copies<STAGES - 3>();
    fence_products();
    __syncthreads();  // all threads have multiplied the lines that the next ones overwrite
    fetch();
    const char* const after = step == 1 ? next : from + WIDE * FRAGMENT;  // the fragments of the next step
    #pragma unroll
    for (int d = 0; d < WIDE; d++) {
      if (REST && d >= REST && step == 1) break;
      const int n = d % DEEP, to = d + DEEP - WIDE;  // the fragment in registers, and its successor in the next step
      const unsigned long long columns = matrix_at(base + stage * LINES + d * HALF);
      unsigned a[4][4];
      wait_products<0>();
      #pragma unroll
      for (int j = 0; j < 4; j++) hold(fragments[n].words[j * BITS / 16][j * BITS / 4 % 4]);
      #pragma unroll
      for (int j = 0; j < 4; j++) open_columns<N>(fragments[n], j, held, a[j]);
      begin_products();
      #pragma unroll
      for (int j = 0; j < 4; j++) group_mma_by_lines(sum, a[j][0], a[j][1], a[j][2], a[j][3], columns + 2 * j);
      commit_products();
      const bool ends = REST && (step == 1 ? d + DEEP >= REST : step == 2 && to >= REST);  // its successor is in `next`
      load(n, ends ? next + n * FRAGMENT : to < 0 ? from + (d + DEEP) * FRAGMENT : after + to * FRAGMENT);
    }
    from = after;
    stage = stage == STAGES - 1 ? 0 : stage + 1;
  }
  wait_products<0>();
  hold(sum);
  store_results(sum, unit % tiles * EACH + thread / 32 * (EACH * 16 / ROWS) + thread % 32 / 4, item,
                [&](int line) { return targets[parity][line]; });
}
wait_copies<0>();

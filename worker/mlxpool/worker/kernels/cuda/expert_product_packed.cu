// Products of some lines with quantised weights of experts, see expert_items.cuh, in fragments of their rows
// (expert_fragments.cuh). A row has STEPS fragments. Weights and lines come through shared memory STAGES - 2
// steps of 128 columns ahead. A warp dequantises fragments in registers as the first operand: the next 16 columns while
// up to three products before them run.
// SETS is a power of two. expert_items.cuh also reads x_shape and weight_shape.
constexpr int THREADS = 2 * ROWS;
const int STRIPS = weight_shape[1], WEIGHT_ROWS = STRIPS * 16;
#include EXPERT_ITEMS
__shared__ int targets[2][ALL];  // rows of `out`, of this unit and the one before
// Notes the rows of `out` of an item's lines. A barrier follows before its results are written.
auto note_targets = [&](const int* item, int parity) {
  if (thread < item[0] >> 16) targets[parity][thread] = target_of(item, thread);
};
constexpr int IN = STEPS * 64, steps = (STEPS + 1) / 2;  // of 128 columns
constexpr int PIECES = 2 * FRAGMENT / 16, TILE = ROWS / 16 * 2 * FRAGMENT;  // of a warp's fragments, 16 bytes each
constexpr int WEIGHT_COPIES = (TILE / 16 + THREADS - 1) / THREADS;
constexpr int HALF = ALL * 128, LINES = 2 * HALF;  // of 64 columns; bytes
constexpr int THREADS_PER_LINE = THREADS / ALL, CHUNKS = (16 + THREADS_PER_LINE - 1) / THREADS_PER_LINE;
const unsigned all_tiles = base + STAGES * LINES;
const int lane = thread % 32, line = thread / THREADS_PER_LINE;
const char* from;  // the weight of the expert whose tile is copied
const N* line_from;  // the line that this thread copies a part of, or null
int weight_at[WEIGHT_COPIES];
auto open = [&](int unit) {
  const int* const item = items + unit / tiles * 2;
  const int expert = item[0] & 0xffff, count = item[0] >> 16, first = unit % tiles * (ROWS / 16);
  from = (const char*)weight + (long)expert * STRIPS * STEPS * FRAGMENT;
  #pragma unroll
  for (int n = 0; n < WEIGHT_COPIES; n++) {
    const int i = n * THREADS + thread, strip = min(first + i / PIECES, STRIPS - 1);
    weight_at[n] = strip * (STEPS * FRAGMENT) + i % PIECES * 16;
  }
  line_from = line < count ? (const N*)x + (long)source_of(item, line) * IN : (const N*)0;
};
int ahead_unit = blockIdx.x, ahead_step = 0, ahead = 0;  // its stage
auto fetch = [&]() {
  if (ahead_unit < units) {
    if (ahead_step == 0) open(ahead_unit);
    #pragma unroll
    for (int n = 0; n < WEIGHT_COPIES; n++) {
      const int i = n * THREADS + thread;
      if (i < TILE / 16 && (STEPS % 2 == 0 || ahead_step < steps - 1 || i % PIECES < PIECES / 2))
        copy(all_tiles + ahead * TILE + i * 16, from + weight_at[n] + ahead_step * (2 * FRAGMENT));
    }
    if (line_from) {
      #pragma unroll
      for (int n = 0; n < CHUNKS; n++) {
        const int chunk = n * THREADS_PER_LINE + thread % THREADS_PER_LINE;  // of 16
        if (chunk < 16 && (STEPS % 2 == 0 || ahead_step * 128 + chunk * 8 < IN))
          copy(base + ahead * LINES + chunk / 8 * HALF + line * 128 + (chunk % 8 ^ line % 8) * 16,
               line_from + ahead_step * 128 + chunk * 8);
      }
    }
    if (++ahead_step == steps) {
      ahead_step = 0;
      ahead_unit += gridDim.x;
    }
  }
  commit_copies();
  ahead = ahead == STAGES - 1 ? 0 : ahead + 1;
};
#pragma unroll 1
for (int i = 0; i < STAGES - 2; i++) fetch();
int stage = 0, parity = 0;
const char* const fragments = (const char*)space + (all_tiles - shared_address(space)) + thread / 32 * (2 * FRAGMENT);
const unsigned held = held_pair<N>(x_shape[0]);
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
    #pragma unroll
    for (int half = 0; half < 2; half++) {
      if (STEPS % 2 && half == 1 && step == steps - 1) break;
      const char* const here = fragments + stage * TILE + half * FRAGMENT;
      Fragment fragment;
      #pragma unroll
      for (int i = 0; i < BITS / 4; i++) *(uint4*)fragment.words[i] = ((const uint4*)here)[i * 32 + lane];
      *(Some<unsigned, FACTORS / 4>*)fragment.factors = ((const Some<unsigned, FACTORS / 4>*)(here + WORDS))[lane / 4];
      const unsigned long long columns = matrix_at(base + stage * LINES + half * HALF);
      #pragma unroll
      for (int j = 0; j < 4; j++) {
        unsigned a[4];
        wait_products<3>();  // the products that read the registers of `a`
        hold(fragment.words[j * BITS / 16][j * BITS / 4 % 4]);
        open_columns<N>(fragment, j, held, a);
        begin_products();
        group_mma_by_lines(sum, a[0], a[1], a[2], a[3], columns + 2 * j);
        commit_products();
      }
    }
    stage = stage == STAGES - 1 ? 0 : stage + 1;
  }
  wait_products<0>();
  hold(sum);
  store_results(sum, unit % tiles * EACH + thread / 32 * (EACH * 16 / ROWS) + thread % 32 / 4, item,
                [&](int line) { return targets[parity][line]; });
}
wait_copies<0>();

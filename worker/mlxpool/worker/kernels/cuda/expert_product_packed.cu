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
const int lane = thread % 32, line = thread / THREADS_PER_LINE, chunk = thread % THREADS_PER_LINE;  // of 8 columns
// The copies of the next step: their sources, and their destinations in its stage. Bit n of `copies` means that this
// thread copies its piece n of weights, later bits its pieces of a line; of `early`, that it does so in a step of 64
// columns.
const char* weight_from[WEIGHT_COPIES];
const N* line_from = (const N*)x;
unsigned copies, early;
unsigned tiles_to = all_tiles + thread * 16;
unsigned lines_to = base + chunk / 8 * HALF + line * 128 + ((chunk ^ line) & 7) * 16;
auto open = [&](int unit) {
  const int* const item = items + unit / tiles * 2;
  const int expert = item[0] & 0xffff, count = item[0] >> 16, first = unit % tiles * (ROWS / 16);
  const char* const from = (const char*)weight + (long)expert * STRIPS * STEPS * FRAGMENT;
  copies = early = 0;
  #pragma unroll
  for (int n = 0; n < WEIGHT_COPIES; n++) {
    const int i = n * THREADS + thread, strip = min(first + i / PIECES, STRIPS - 1);
    weight_from[n] = from + strip * (STEPS * FRAGMENT) + i % PIECES * 16;
    copies |= (i < TILE / 16) << n;
    early |= (i < TILE / 16 && i % PIECES < PIECES / 2) << n;
  }
  if (line >= count) return;
  line_from = (const N*)x + (long)source_of(item, line) * IN + chunk * 8;
  #pragma unroll
  for (int n = 0; n < CHUNKS; n++) {
    const int at = n * THREADS_PER_LINE + chunk;
    copies |= (at < 16) << WEIGHT_COPIES + n;
    early |= (at < 8) << WEIGHT_COPIES + n;
  }
};
int ahead_unit = blockIdx.x, left = 0, ahead = 0;  // the unit that is copied, its steps that are left, its stage
auto fetch = [&]() {
  if (ahead_unit < units) {
    if (left == 0) {
      open(ahead_unit);
      left = steps;
    }
    const unsigned mine = STEPS % 2 == 0 || left > 1 ? copies : early;
    #pragma unroll
    for (int n = 0; n < WEIGHT_COPIES; n++) {
      if (mine >> n & 1) copy(tiles_to + n * THREADS * 16, weight_from[n]);
      weight_from[n] += 2 * FRAGMENT;
    }
    #pragma unroll
    for (int n = 0; n < CHUNKS; n++) {
      const int before = n * THREADS_PER_LINE;  // chunks; the xor is the swizzle of `chunk + before`
      if (mine >> WEIGHT_COPIES + n & 1)
        copy((lines_to ^ before % 8 * 16) + before / 8 * HALF, line_from + before * 8);
    }
    line_from += 128;
    if (--left == 0) ahead_unit += gridDim.x;
  }
  commit_copies();
  const bool last = ahead == STAGES - 1;
  ahead = last ? 0 : ahead + 1;
  tiles_to += TILE - (last ? STAGES * TILE : 0);
  lines_to += LINES - (last ? STAGES * LINES : 0);
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

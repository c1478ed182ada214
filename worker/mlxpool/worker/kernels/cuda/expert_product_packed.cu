// Products with quantised weights of experts, see expert_items.cuh, in MLX's layout: BITS a number, and a scale for
// each GROUP of a row, of which there are GROUPS: affine ones have a bias as well; FLOATS are those of mxfp4.
// Weights and lines come through shared memory STAGES - 2 steps of 128 columns ahead, a tile's scales with its
// first step. A weight is dequantised in registers as the first operand. The order of columns is free as long
// as both operands agree: of 64 columns, a thread has 16 neighbours of a row. IN_ORDERED: x has its columns in that
// order (`place_of` in expert_items.cuh), otherwise pairs of a line's columns are copied to other places.
// SETS is a power of two. expert_items.cuh also reads x_shape.
#include EXPERT_ITEMS
using Scale = ScaleOf<N, FLOATS>::Type;
constexpr int IN = GROUPS * GROUP, steps = (IN + 127) / 128, KINDS = FLOATS ? 1 : 2;
constexpr int ROW_BYTES = 16 * BITS, PIECES = ROW_BYTES / 16;  // of a step; pieces of 16 bytes
constexpr int WEIGHT_COPIES = ROWS * PIECES / THREADS;
constexpr int LINES_AT = ROWS * ROW_BYTES, HALF = ALL * 128, STAGE = LINES_AT + 2 * HALF;
constexpr int SCALE_BYTES = GROUPS * sizeof(Scale);  // of a row
constexpr int SCALE_LINE = SCALE_BYTES % 16 == 0 ? SCALE_BYTES + 16 : SCALE_BYTES;  // in shared memory
constexpr int THREADS_PER_LINE = THREADS / ALL, PAIRS = 64 / THREADS_PER_LINE;  // of columns that a thread copies
constexpr int CHUNKS = (16 + THREADS_PER_LINE - 1) / THREADS_PER_LINE;  // of 8 columns
const unsigned all_scales = base + STAGES * STAGE;  // [2][KINDS][ROWS] lines, of a unit and the next one
const int lane = thread % 32, quarter = lane % 4;
const int piece = thread % PIECES, row = thread / PIECES;
auto swizzled = [](int row, int piece) -> int { return piece ^ (BITS == 4 ? row & 2 : (row & 1) * 4); };
const char* from;  // the weight of the expert whose tile is copied
const N* line_from;  // the line that this thread copies a part of; 0: none
int weight_at[WEIGHT_COPIES];
int ahead_parity = 0;
auto open = [&](int unit) {
  const int* const item = items + unit / tiles * 2;
  const int expert = item[0] & 0xffff, count = item[0] >> 16, first = unit % tiles * EACH;
  const long experts_rows = (long)expert * weight_shape[1];
  from = (const char*)weight + experts_rows * (IN / 8 * BITS);
  #pragma unroll
  for (int n = 0; n < WEIGHT_COPIES; n++)
    weight_at[n] = row_of(unit, n * (THREADS / PIECES) + row) * (IN / 8 * BITS) + piece * 16;
  const int line = thread / THREADS_PER_LINE;
  line_from = line < count ? (const N*)x + (long)source_of(item, line) * IN : (const N*)0;
  #pragma unroll
  for (int part = 0; part < KINDS * (1 + GATED); part++) {
    const int kind = part / (1 + GATED), beside = GATED ? part % 2 : 0;
    const long begin = (experts_rows + beside * OUT + first) * SCALE_BYTES;
    const char* const its = (kind ? (const char*)biases : (const char*)scales) + begin;
    const unsigned into = all_scales + ((ahead_parity * KINDS + kind) * ROWS + beside * EACH) * SCALE_LINE;
    for (int i = thread; i < min(EACH, OUT - first) * SCALE_BYTES / 16; i += THREADS) {
      const int padding = SCALE_LINE > SCALE_BYTES ? i / (SCALE_BYTES / 16) * 16 : 0;
      copy(into + i * 16 + padding, its + i * 16);
    }
  }
  ahead_parity ^= 1;
};
int ahead_unit = blockIdx.x, ahead_step = 0;
unsigned ahead_at = base;  // of the stage that is copied next
auto fetch = [&]() {
  if (ahead_unit < units) {
    if (ahead_step == 0) open(ahead_unit);
    if (IN % 128 == 0 || ahead_step * 128 + piece * (128 / PIECES) < IN)
      #pragma unroll
      for (int n = 0; n < WEIGHT_COPIES; n++) {
        const int at = n * (THREADS / PIECES) + row;
        copy(ahead_at + at * ROW_BYTES + swizzled(at, piece) * 16,
             from + weight_at[n] + ahead_step * ROW_BYTES);
      }
    if (line_from) {
      const int line = thread / THREADS_PER_LINE;
      #pragma unroll
      for (int n = 0; IN_ORDERED && n < CHUNKS; n++) {
        const int chunk = n * THREADS_PER_LINE + thread % THREADS_PER_LINE;  // of 16
        if (chunk < 16 && (IN % 128 == 0 || ahead_step * 128 + chunk * 8 < IN))
          copy(ahead_at + LINES_AT + chunk / 8 * HALF + line * 128 + (chunk % 8 ^ line % 8) * 16,
               line_from + ahead_step * 128 + chunk * 8);
      }
      #pragma unroll
      for (int n = 0; !IN_ORDERED && n < PAIRS; n++) {
        const int pair = n * THREADS_PER_LINE + thread % THREADS_PER_LINE;  // of 64
        const int slot = pair % 8 / 2 * 2 + pair % 2, word = pair % 32 / 8;
        if (IN % 128 == 0 || ahead_step * 128 + pair * 2 < IN)
          copy_bytes<4>(ahead_at + LINES_AT + pair / 32 * HALF + line * 128 + (slot ^ line % 8) * 16 + word * 4,
                        line_from + ahead_step * 128 + pair * 2);
      }
    }
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
const int low = thread / 32 * 16 + lane / 4;  // this thread's rows of the tile: low and low + 8
const char* const shared_bytes = (const char*)space - shared_address(space);
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
    __syncthreads();  // all threads have multiplied what the next columns overwrite
    fetch();
    #pragma unroll
    for (int half = 0; half < 2; half++) {
      if (IN % 128 && half == 1 && step == steps - 1) break;
      unsigned a[4][4];
      #pragma unroll
      for (int other = 0; other < 2; other++) {
        const int its = low + other * 8;
        // Gates and others alternate in the tile, and are apart among the scales.
        const int scale_row = GATED ? its / 16 * 8 + its % 8 + other * EACH : its;
        const unsigned scale_at = all_scales + (parity * KINDS * ROWS + scale_row) * SCALE_LINE
                                  + (step * 128 + half * 64 + quarter * 16) / GROUP * sizeof(Scale);
        const Scale scale = *(const Scale*)(shared_bytes + scale_at);
        const Scale bias_of = *(const Scale*)(shared_bytes + scale_at + (KINDS - 1) * ROWS * SCALE_LINE);
        const Opened<N, BITS, FLOATS> opened(scale, bias_of);
        const char* const its_words = shared_bytes + at + its * ROW_BYTES;
        unsigned some[BITS / 2];  // 16 numbers
        if (BITS == 4)
          *(uint2*)some = *(const uint2*)(its_words + swizzled(its, half * 2 + quarter / 2) * 16 + quarter % 2 * 8);
        else
          *(uint4*)some = *(const uint4*)(its_words + swizzled(its, half * 4 + quarter) * 16);
        #pragma unroll
        for (int k = 0; k < 4; k++)
          #pragma unroll
          for (int n = 0; n < 2; n++)
            a[k][n * 2 + other] = IN_ORDERED ? opened.pair_apart(some, k * 2 + n) : opened.pair(some, k * 2 + n);
      }
      begin_products();
      const unsigned long long columns = matrix_at(at + LINES_AT + half * HALF);
      #pragma unroll
      for (int k = 0; k < 4; k++)
        group_mma_by_lines(sum, a[k][0], a[k][1], a[k][2], a[k][3], columns + 2 * k);
      commit_products();
      wait_products<1>();
    }
    at = at == base + (STAGES - 1) * STAGE ? base : at + STAGE;
  }
  wait_products<0>();
  hold(sum);
  store_results(sum, unit, item, parity);
}
wait_copies<0>();

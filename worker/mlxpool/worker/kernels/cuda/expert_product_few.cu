// Products of few lines with quantised weights of experts, see expert_items.cuh, in fragments of their rows
// (expert_fragments.cuh). A row has STEPS fragments. Units are HIGH strips of 16 rows of an item's expert; a thread
// block has neighbouring units, and each of its warps has every WARPS-th with all columns. A warp reads weights into
// registers, DEEP steps of 64 columns ahead, also across its units. Shared memory holds up to ROOM lines, of one or
// several items. expert_items.cuh also reads x_shape and weight_shape.
constexpr int ROWS = 16 * HIGH, THREADS = 32 * WARPS;
const int WEIGHT_ROWS = weight_shape[1] * 16;
#include EXPERT_ITEMS
constexpr int IN = STEPS * 64, STRIP = STEPS * FRAGMENT;  // bytes of a strip
constexpr int LINE = IN * 2 + 16;  // bytes of a line: the pieces of eight lines are in different banks
const int lane = thread % 32, warp = thread / 32;
const int end = (int)((long)units * (blockIdx.x + 1) / gridDim.x);
const unsigned held = held_pair<N>(x_shape[0]);
auto padded_lines = [&](int unit) -> int { return (items[unit / tiles * 2] >> 16) + 7 & ~7; };
auto strips_of = [&](int unit) -> const char* {
  const long expert = items[unit / tiles * 2] & 0xffff;
  return (const char*)weight + (expert * weight_shape[1] + unit % tiles * HIGH) * STRIP + lane * 16;
};
const int factors_at = WORDS + lane / 4 * FACTORS - lane * 16;
Fragment ahead[DEEP][HIGH];
auto load = [&](int d, const char* from, int step) {
  #pragma unroll
  for (int high = 0; high < HIGH; high++) {
    const int at = step * FRAGMENT + high * STRIP;
    #pragma unroll
    for (int i = 0; i < BITS / 4; i++) load_once(ahead[d][high].words[i], from + (at + i * 512));
    load_once(ahead[d][high].factors, from + (at + factors_at));
  }
};
int loaded = -1;  // the unit whose first steps are in `ahead`
#pragma unroll 1
for (int first = (int)((long)units * blockIdx.x / gridDim.x), last; first < end; first = last) {
  last = first;
  for (int used = 0; last < end && (used += padded_lines(last)) <= ROOM;) last = min(end, (last / tiles + 1) * tiles);
  int unit = first + warp;
  if (unit < last && loaded != unit) {
    const char* const from = strips_of(unit);
    #pragma unroll
    for (int d = 0; d < DEEP; d++)
      load(d, from, d);
  }
  __syncthreads();  // all warps have multiplied the lines before
  unsigned to = base;
  for (int one = first; one < last; one = (one / tiles + 1) * tiles) {
    const int* const item = items + one / tiles * 2;
    for (int i = thread; i < (item[0] >> 16) * (IN / 8); i += THREADS) {
      const int line = i / (IN / 8), piece = i % (IN / 8);
      copy(to + line * LINE + piece * 16, (const N*)x + (long)source_of(item, line) * IN + piece * 8);
    }
    to += padded_lines(one) * LINE;
  }
  commit_copies();
  wait_copies<0>();
  __syncthreads();
  #pragma unroll 1
  for (; unit < last; unit += WARPS) {
    const int* const item = items + unit / tiles * 2;
    const int count = item[0] >> 16;
    unsigned lines_at = base + lane % 8 * LINE + lane / 8 * 16;
    for (int one = first; one / tiles < unit / tiles; one += tiles) lines_at += padded_lines(one) * LINE;
    loaded = unit + WARPS < last ? unit + WARPS : last + warp;
    const char* const next = strips_of(min(loaded, end - 1));
    float sum[HIGH][4 * SETS];
    #pragma unroll
    for (int i = 0; i < HIGH * 4 * SETS; i++) sum[i / (4 * SETS)][i % (4 * SETS)] = 0;
    // The compiler must not know the number of steps left: with a possible end after each step it cannot put off the
    // loads of several steps until the last of them.
    unsigned left = STEPS;
    hold(left);
    const char* from = strips_of(unit) + DEEP * FRAGMENT;
    bool reads = true;
    #pragma unroll 1
    while (left > 0) {
      #pragma unroll
      for (int d = 0; d < DEEP && left > 0; d++) {
        #pragma unroll
        for (int half = 0; half < 2; half++) {
          unsigned a[2][HIGH][4];
          #pragma unroll
          for (int i = 0; i < 2 * HIGH; i++)
            open_columns<N>(ahead[d][i % HIGH], half * 2 + i / HIGH, held, a[i / HIGH][i % HIGH]);
          #pragma unroll
          for (int set = 0; set < SETS; set++) {
            if (set > 0 && set * 8 >= count) continue;
            unsigned b[4];
            load_matrices(b, lines_at + set * 8 * LINE + d * 128 + half * 64);
            #pragma unroll
            for (int i = 0; i < 2 * HIGH; i++)
              mma(*(float(*)[4])&sum[i % HIGH][set * 4], a[i / HIGH][i % HIGH], b[i / HIGH * 2], b[i / HIGH * 2 + 1], N());
          }
        }
        if ((d == 0 || STEPS % DEEP) && left <= DEEP) {
          from = next;
          reads = loaded < end;
        }
        if (reads) load(d, from, d);
        left--;
      }
      from += DEEP * FRAGMENT;
      lines_at += DEEP * 128;
    }
    #pragma unroll
    for (int high = 0; high < HIGH; high++)
      store_results(sum[high], (unit % tiles * HIGH + high) * (EACH / HIGH) + lane / 4, item,
                    [&](int line) { return target_of(item, line); });
  }
}

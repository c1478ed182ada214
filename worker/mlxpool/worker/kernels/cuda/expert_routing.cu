// Chooses the experts of each line, weighs them, and lists the work of the experts' products.
// A thread block has LINES lines: their logits, which it computes if MULTIPLIES, and a warp for each
// line that takes its best experts in turn (expert_choice.cuh). The block that finishes last sorts
// all choices by expert, in ascending order, and divides each expert's choices into items of `item_lines` lines.
// The words of `plan`, see expert_routing.py: the number of items; weights (float32) and experts of all
// choices; choices by expert, SHARED also a choice of each line; items, of two words: expert and
// count << 16, and the first of its sorted choices.
// NORMED_LINES: the logits are computed from the norms of the lines, which are written to `normed`.
constexpr int WARPS = 16, SETS = LINES / 8, THREADS = 32 * WARPS, EACH = (EXPERTS + 31) / 32;
constexpr int TILES = (EXPERTS + 15) / 16, PARTS = TILES < WARPS ? WARPS / TILES : 1;
constexpr float TINY = 1e-20f;  // added to a sum of sigmoids, against a division by zero
constexpr float NONE = -3e38f;  // less than any number
const int all = x_shape[0], choices = all * CHOSEN, first = blockIdx.x * LINES;
const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
const int limit = *item_lines;  // read early: it is needed late, and may come from memory
float addition[EACH];
#pragma unroll
for (int i = 0; i < EACH; i++) addition[i] = ADDED && i * 32 + lane < EXPERTS ? up(added[i * 32 + lane]) : 0.f;
extern __shared__ uint4 space[];
float* const scores = (float*)space;  // [LINES][EXPERTS]
int* const made = (int*)plan;
float* const weights = (float*)made + 4;
int* const experts = made + 4 + choices;
int* const sorted = experts + choices;
if (MULTIPLIES) {
  float* const parts = scores + LINES * EXPERTS;  // [PARTS][LINES][EXPERTS]
  const int in = x_shape[1], line = lane >> 2, quarter = lane & 3;
  // Lines after the last repeat it.
  const N* numbers[SETS];
  #pragma unroll
  for (int set = 0; set < SETS; set++)
    numbers[set] = (const N*)x + (long)min(first + set * 8 + line, all - 1) * in + quarter * 8;
  if (NORMED_LINES) {
    constexpr int APART = NORMED_LINES + 32;  // numbers: so lines have different banks
    N* const lines = (N*)(parts + PARTS * LINES * EXPERTS);  // [LINES][APART]
    for (long i = threadIdx.x; i < (long)EXPERTS * NORMED_LINES / 64; i += THREADS) prefetch((const N*)gate + i * 64);
    for (int l = warp; l < min(LINES, all - first); l += WARPS) {
      constexpr int PIECES = (NORMED_LINES + 255) / 256 + !NORMED_LINES;
      const long at = (long)(first + l) * in;
      Some<N, 8> some[PIECES];
      float squares = 0;
      #pragma unroll
      for (int n = 0; n < PIECES; n++) {
        const int d = n * 256 + lane * 8;
        if (d >= NORMED_LINES) continue;
        some[n] = *(const Some<N, 8>*)((const N*)x + at + d);
        #pragma unroll
        for (int i = 0; i < 8; i++) squares += up(some[n].n[i]) * up(some[n].n[i]);
      }
      #pragma unroll
      for (int other = 1; other < 32; other *= 2) squares += __shfl_xor_sync(0xffffffff, squares, other);
      const float factor = rsqrtf(squares / max(NORMED_LINES, 1) + EPS);
      #pragma unroll
      for (int n = 0; n < PIECES; n++) {
        const int d = n * 256 + lane * 8;
        if (d >= NORMED_LINES) continue;
        const Some<N, 8> by = *(const Some<N, 8>*)((const N*)gain + d);
        Some<N, 8> result;
        #pragma unroll
        for (int i = 0; i < 8; i++) {
          N rounded;
          down(up(some[n].n[i]) * factor, &rounded);
          down(up(rounded) * up(by.n[i]), &result.n[i]);
        }
        *(Some<N, 8>*)((N*)normed + at + d) = result;
        *(Some<N, 8>*)(lines + l * APART + d) = result;
      }
    }
    #pragma unroll
    for (int set = 0; set < SETS; set++)
      numbers[set] = lines + min(set * 8 + line, all - first - 1) * APART + quarter * 8;
    __syncthreads();
  }
  #pragma unroll 1
  for (int job = warp; job < TILES * PARTS; job += WARPS) {
    const int row = job / PARTS * 16 + line, part = job % PARTS;
    const N* const low = (const N*)gate + (long)min(row, EXPERTS - 1) * in + quarter * 8;
    const N* const high = (const N*)gate + (long)min(row + 8, EXPERTS - 1) * in + quarter * 8;
    const int end = in / 32 * (part + 1) / PARTS;
    float sum[SETS][4] = {};
    #pragma unroll (8 / SETS)
    for (int step = in / 32 * part / PARTS; step < end; step++) {
      const uint4 one = *(const uint4*)(low + step * 32), other = *(const uint4*)(high + step * 32);
      const unsigned left[4] = {one.x, other.x, one.y, other.y};
      const unsigned right[4] = {one.z, other.z, one.w, other.w};
      #pragma unroll
      for (int set = 0; set < SETS; set++) {
        const uint4 b = *(const uint4*)(numbers[set] + step * 32);
        mma(sum[set], left, b.x, b.y, N());
        mma(sum[set], right, b.z, b.w, N());
      }
    }
    #pragma unroll
    for (int set = 0; set < SETS; set++)
      #pragma unroll
      for (int i = 0; i < 4; i++)
        if (row + i / 2 * 8 < EXPERTS)
          parts[(part * LINES + set * 8 + quarter * 2 + i % 2) * EXPERTS + row + i / 2 * 8] = sum[set][i];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < LINES * EXPERTS; i += THREADS) {
    float sum = 0;
    #pragma unroll
    for (int part = 0; part < PARTS; part++) sum += parts[part * LINES * EXPERTS + i];
    scores[i] = sum;
  }
} else {
  for (int i = threadIdx.x; i < LINES * EXPERTS; i += THREADS)
    if (first + i / EXPERTS < all) scores[i] = up(x[(long)first * EXPERTS + i]);
}
__syncthreads();
if (warp < LINES && first + warp < all) {
  float* const mine = scores + warp * EXPERTS;
#include EXPERT_CHOICE
  if (lane < CHOSEN) {
    weights[(first + warp) * CHOSEN + lane] = weight;
    experts[(first + warp) * CHOSEN + lane] = chosen;
  }
}
__syncthreads();
if (gridDim.x > 1) {
  __shared__ int before;
  if (threadIdx.x == 0) {
    __threadfence();  // for the writes of all threads, which wait for each other before and after it
    before = atomicAdd((int*)arrived, 1);
    __threadfence();
  }
  __syncthreads();
  if (before < gridDim.x - 1) return;
  if (threadIdx.x == 0) *(int*)arrived = 0;
}
// Each warp sorts a span of the choices. An expert's choices of a warp follow its choices of the warps before.
int* const begins = (int*)space;  // [WARPS][EXPERTS]
int* const starts = begins + WARPS * EXPERTS;  // [EXPERTS]
__shared__ int sums[2][WARPS];
const int span = (choices + THREADS - 1) / THREADS * 32;
const int from = warp * span, to = min(from + span, choices);
for (int i = threadIdx.x; i < WARPS * EXPERTS; i += THREADS) begins[i] = 0;
__syncthreads();
for (int i = from + lane; i < to; i += 32) atomicAdd(begins + warp * EXPERTS + __ldcg(experts + i), 1);
__syncthreads();
const int expert = threadIdx.x;  // a thread for each expert
int count = 0;
if (expert < EXPERTS)
  for (int w = 0; w < WARPS; w++) {
    const int its = begins[w * EXPERTS + expert];
    begins[w * EXPERTS + expert] = count;
    count += its;
  }
const int own[2] = {count, (count + limit - 1) / limit};
int sum[2] = {own[0], own[1]};  // of this expert and all experts before it
#pragma unroll
for (int what = 0; what < 2; what++) {
  #pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const int less = __shfl_up_sync(0xffffffff, sum[what], by);
    if (lane >= by) sum[what] += less;
  }
  if (lane == 31) sums[what][warp] = sum[what];
}
__syncthreads();
int items = 0;
#pragma unroll
for (int w = 0; w < WARPS; w++) {
  if (w < warp) sum[0] += sums[0][w], sum[1] += sums[1][w];
  items += sums[1][w];
}
int* const listed = made + (5 + 3 * choices + SHARED * all) / 2 * 2;
auto list = [&](int item, int whose, int begin, int size) {
  listed[2 * item] = whose | size << 16;
  listed[2 * item + 1] = begin;
};
if (expert < EXPERTS) {
  const int start = sum[0] - own[0];
  starts[expert] = start;
  for (int i = 0; i < own[1]; i++)
    list(sum[1] - own[1] + i, expert, start + i * limit, min(limit, count - i * limit));
}
__syncthreads();
#pragma unroll 1
for (int i = from + lane; i - lane < to; i += 32) {
  const int whose = i < to ? __ldcg(experts + i) : EXPERTS;
  const unsigned same = __match_any_sync(0xffffffff, whose);
  const int rank = __popc(same & (1u << lane) - 1);
  int* const begin = begins + warp * EXPERTS + whose;
  if (i < to) sorted[starts[whose] + *begin + rank] = i;
  __syncwarp();
  if (i < to && rank == 0) *begin += __popc(same);
  __syncwarp();
}
if (SHARED) {
  for (int i = threadIdx.x; i < all; i += THREADS) sorted[choices + i] = choices + i;
  for (int i = threadIdx.x; i * limit < all; i += THREADS)
    list(items + i, EXPERTS, choices + i * limit, min(limit, all - i * limit));
  items += (all + limit - 1) / limit;
}
if (threadIdx.x == 0) made[0] = items;

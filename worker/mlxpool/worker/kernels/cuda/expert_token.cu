// What its experts make of one token, in one launch whose thread blocks wait for each other twice (grid_barrier.cuh):
// out [1, SIZE] = the RESIDUAL, if any, + the weighted sum of down(silu(gate) * up) of the chosen experts, and of the
// SHARED one, of the norm of x [1, SIZE] with `gain`. A warp has the logit of an expert, then pairs of rows of gate and
// up, then rows of all downs; all its loads of a row are in flight at a time. The router's row, and the first rows of the
// shared expert, are asked for before it is known what they are multiplied with. Numbers are rounded as by the
// separate kernels. `memory`: the state of the barrier, the logits [EXPERTS], and what gates and ups make [SLOTS, WIDTH].
constexpr int WARPS = 16, THREADS = 32 * WARPS, EACH = (EXPERTS + 31) / 32;
constexpr int SLOTS = SHARED + CHOSEN;  // experts, the shared one first
constexpr int LOADS = (SIZE + 255) / 256, WIDTH_LOADS = (WIDTH + 255) / 256;  // of 16 bytes, of a lane in a row
constexpr int BATCH = 8, DOWN_BATCH = 12;  // loads of a row that a lane has in flight
constexpr int COUNT = (SIZE / 8 + THREADS - 1) / THREADS;  // pieces of 16 bytes of x, of a thread
constexpr float TINY = 1e-20f, NONE = -3e38f;
using Eight = Some<N, 8>;
extern __shared__ uint4 space[];
uint4* const line = space;  // the normed token, then what gates and ups make
float* const scores = (float*)(line + (SIZE > SLOTS * WIDTH ? SIZE : SLOTS * WIDTH) / 8);  // [EXPERTS]
float* const sums = scores + EXPERTS;  // [WARPS]
float* const weights = sums + WARPS;  // [CHOSEN]
int* const experts = (int*)(weights + CHOSEN);  // [CHOSEN]
const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
const int own = warp * gridDim.x + blockIdx.x, all = WARPS * gridDim.x;  // the number of this warp
float* const logits = (float*)memory + 4;
N* const inner = (N*)(logits + (EXPERTS + 3) / 4 * 4);
GridBarrier barrier((unsigned*)memory, (bool*)(experts + CHOSEN));
// Asks for up to COUNT loads of a row of LENGTH numbers.
auto ask = [&](const N* row, int from, int length, uint4& into) {
  const int at = (from * 32 + lane) * 8;
  into = at < length ? *(const uint4*)(row + at) : uint4{0, 0, 0, 0};
};
// The sum of the products of eight numbers.
auto multiplied = [&](uint4 row, const uint4* with, int from, int length) -> float {
  const int at = from * 32 + lane;
  if (at * 8 >= length) return 0.f;
  const Eight left = *(const Eight*)&row, right = *(const Eight*)(with + at);
  float sum = 0;
  #pragma unroll
  for (int i = 0; i < 8; i++) sum = fmaf(up(left.n[i]), up(right.n[i]), sum);
  return sum;
};
auto whole = [](float sum) -> float {
  #pragma unroll
  for (int by = 1; by < 32; by *= 2) sum += __shfl_xor_sync(0xffffffff, sum, by);
  return sum;
};
// Gate and up of a unit, a row of an expert; its up is WIDTH rows behind.
auto unit_row = [&](int unit) -> const N* {
  const int slot = unit / WIDTH;
  const N* const from = SHARED && slot == 0 ? (const N*)shared_gate_up
                                            : (const N*)gate_up + (long)experts[slot - SHARED] * 2 * WIDTH * SIZE;
  return from + (long)(unit % WIDTH) * SIZE;
};
uint4 one[BATCH], other[BATCH];
auto ask_unit = [&](int unit, int from) {
  const N* const row = unit_row(unit);
  #pragma unroll
  for (int i = 0; i < BATCH; i++)
    if (from + i < LOADS) {
      ask(row, from + i, SIZE, one[i]);
      ask(row + (long)WIDTH * SIZE, from + i, SIZE, other[i]);
    }
};
#pragma unroll
for (int i = 0; i < BATCH; i++)
  if (i < LOADS && own < EXPERTS) ask((const N*)gate + (long)own * SIZE, i, SIZE, one[i]);
// The norm of the token.
Eight raw[COUNT];
float squares = 0;
#pragma unroll
for (int n = 0; n < COUNT; n++) {
  const int piece = n * THREADS + thread;
  if (piece * 8 >= SIZE) continue;
  raw[n] = ((const Eight*)x)[piece];
  #pragma unroll
  for (int i = 0; i < 8; i++) squares += up(raw[n].n[i]) * up(raw[n].n[i]);
}
squares = whole(squares);
if (lane == 0) sums[warp] = squares;
__syncthreads();
squares = 0;
#pragma unroll
for (int w = 0; w < WARPS; w++) squares += sums[w];
const float factor = rsqrtf(squares / SIZE + EPS);
#pragma unroll
for (int n = 0; n < COUNT; n++) {
  const int piece = n * THREADS + thread;
  if (piece * 8 >= SIZE) continue;
  const Eight by = ((const Eight*)gain)[piece];
  Eight result;
  #pragma unroll
  for (int i = 0; i < 8; i++) {
    N rounded;
    down(up(raw[n].n[i]) * factor, &rounded);
    down(up(rounded) * up(by.n[i]), &result.n[i]);
  }
  *(Eight*)(line + piece) = result;
}
__syncthreads();
#pragma unroll 1
for (int expert = own; expert < EXPERTS; expert += all) {
  float sum = 0;
  #pragma unroll 1
  for (int from = 0; from < LOADS; from += BATCH) {
    if (expert != own || from > 0)
      #pragma unroll
      for (int i = 0; i < BATCH; i++)
        if (from + i < LOADS) ask((const N*)gate + (long)expert * SIZE, from + i, SIZE, one[i]);
    #pragma unroll
    for (int i = 0; i < BATCH; i++)
      if (from + i < LOADS) sum += multiplied(one[i], line, from + i, SIZE);
  }
  sum = whole(sum);
  if (lane == 0) logits[expert] = sum;
}
const bool early = SHARED && own < WIDTH;  // this warp's first unit is the shared expert's
if (early) ask_unit(own, 0);
// No expert's weights are known before all logits are, and its sums.
auto wait_for_all = [&]() -> bool {
  if (barrier.wait<GIVES_UP>()) return true;
  for (int i = thread; i < SIZE; i += THREADS) down(__uint_as_float(0x7fffffff), (N*)out + i);
  return false;
};
barrier.arrive();
if (!wait_for_all()) return;
for (int i = thread; i < EXPERTS; i += THREADS) scores[i] = __ldcg(logits + i);
__syncthreads();
if (warp == 0) {
  float* const mine = scores;
  float addition[EACH];
  #pragma unroll
  for (int i = 0; i < EACH; i++) addition[i] = ADDED && i * 32 + lane < EXPERTS ? up(added[i * 32 + lane]) : 0.f;
#include EXPERT_CHOICE
  if (lane < CHOSEN) {
    experts[lane] = chosen;
    weights[lane] = weight;
  }
}
__syncthreads();
#pragma unroll 1
for (int unit = own; unit < SLOTS * WIDTH; unit += all) {
  float left = 0, right = 0;
  #pragma unroll 1
  for (int from = 0; from < LOADS; from += BATCH) {
    if (!early || unit != own || from > 0) ask_unit(unit, from);
    #pragma unroll
    for (int i = 0; i < BATCH; i++)
      if (from + i < LOADS) {
        left += multiplied(one[i], line, from + i, SIZE);
        right += multiplied(other[i], line, from + i, SIZE);
      }
  }
  left = whole(left);
  right = whole(right);
  if (lane == 0) down(gated(left, right, N()), inner + unit);
}
auto down_row = [&](int slot, int row) -> const N* {
  const N* const from = SHARED && slot == 0 ? (const N*)shared_down
                                            : (const N*)down_weight + (long)experts[slot - SHARED] * SIZE * WIDTH;
  return from + (long)row * WIDTH;
};
for (int i = lane; own < SIZE && i < SLOTS * (WIDTH / 64); i += 32)
  prefetch(down_row(i / (WIDTH / 64), own) + i % (WIDTH / 64) * 64);
barrier.arrive();
if (!wait_for_all()) return;
barrier.end();
for (int i = thread; i < SLOTS * WIDTH / 8; i += THREADS) line[i] = __ldcg((const uint4*)inner + i);
__syncthreads();
constexpr int JOBS = SLOTS * WIDTH_LOADS;
#pragma unroll 1
for (int row = own; row < SIZE; row += all) {
  float sum[SLOTS] = {};
  #pragma unroll
  for (int from = 0; from < JOBS; from += DOWN_BATCH) {
    uint4 some[DOWN_BATCH];
    #pragma unroll
    for (int i = 0; i < DOWN_BATCH; i++)
      if (from + i < JOBS)
        ask(down_row((from + i) / WIDTH_LOADS, row), (from + i) % WIDTH_LOADS, WIDTH, some[i]);
    #pragma unroll
    for (int i = 0; i < DOWN_BATCH; i++)
      if (from + i < JOBS) {
        const int slot = (from + i) / WIDTH_LOADS;
        sum[slot] += multiplied(some[i], line + slot * (WIDTH / 8), (from + i) % WIDTH_LOADS, WIDTH);
      }
  }
  float made = 0;
  N rounded;
  #pragma unroll
  for (int slot = 0; slot < SLOTS; slot++) sum[slot] = whole(sum[slot]);
  #pragma unroll
  for (int n = 0; n < CHOSEN; n++) {
    down(sum[SHARED + n], &rounded);
    made += weights[n] * up(rounded);
  }
  if (SHARED) {
    down(made, &rounded);
    made = up(rounded);
    down(sum[0], &rounded);
    made += up(rounded);
  }
  if (RESIDUAL) {
    down(made, &rounded);
    made = up(rounded) + up(((const N*)residual)[row]);
  }
  if (lane == 0) down(made, (N*)out + row);
}

// The mixture of experts of one token, in one launch whose thread blocks wait for each other twice (token_rows.cuh):
// out [1, SIZE] = the RESIDUAL, if any, + the weighted sum of down(silu(gate) * up) of the chosen experts, and of the
// SHARED expert, of the norm of x [1, SIZE] with `gain`. A warp has the logit of an expert, then pairs of rows of gate
// and up, then rows of all downs. The router's row, and the first rows of the shared expert, are loaded before their
// other factor is known. Numbers are rounded as by the separate kernels. `memory`: the state of the barrier, the
// logits [EXPERTS], and the activations [SLOTS, WIDTH].
constexpr int EACH = (EXPERTS + 31) / 32, ALL = TOKEN_WARPS * BLOCKS;
constexpr int SLOTS = SHARED + CHOSEN;  // experts, the shared one first
constexpr int LOADS = (SIZE + 255) / 256, WIDTH_LOADS = (WIDTH + 255) / 256;  // of a lane in a row
constexpr int BATCH = 8, DOWN_BATCH = 12;  // loads that a lane has in flight, of gate and up each, and of downs
constexpr float TINY = 1e-20f, NONE = -3e38f;
extern __shared__ uint4 space[];
uint4* const line = space;  // the normed token, then the activations
float* const scores = (float*)(line + (SIZE > SLOTS * WIDTH ? SIZE : SLOTS * WIDTH) / 8);  // [EXPERTS]
float* const sums = scores + EXPERTS;  // [TOKEN_WARPS]
float* const weights = sums + TOKEN_WARPS;  // [CHOSEN]
int* const experts = (int*)(weights + CHOSEN);  // [CHOSEN]
const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, own = warp * BLOCKS + blockIdx.x;
float* const logits = (float*)memory + 4;
N* const inner = (N*)(logits + (EXPERTS + 3) / 4 * 4);
GridBarrier barrier((unsigned*)memory, (bool*)(experts + CHOSEN));
// The gate row of a unit, which is a row of an expert; its up row is WIDTH rows further.
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
      one[i] = load_of<N, SIZE>(row, from + i);
      other[i] = load_of<N, SIZE>(row + (long)WIDTH * SIZE, from + i);
    }
};
TokenRows<N, SIZE, EXPERTS, ALL> router;
auto router_row = [&](int expert) { return (const N*)gate + (long)expert * SIZE; };
router.ask(own, 0, router_row);
norm_token<N, SIZE>((const N*)x, (const N*)gain, EPS, line, sums);
router.multiply(own, router_row, [&](int) { return line; }, [&](int expert, float sum) {
  if (lane == 0) logits[expert] = sum;
});
const bool early = SHARED && own < WIDTH;  // this warp's first unit is the shared expert's
if (early) ask_unit(own, 0);
barrier.arrive();
if (!wait_for_all<GIVES_UP>(barrier, (N*)out, SIZE)) return;
#include TOKEN_CHOICE
#pragma unroll 1
for (int unit = own; unit < SLOTS * WIDTH; unit += ALL) {
  float left = 0, right = 0;
  #pragma unroll 1
  for (int from = 0; from < LOADS; from += BATCH) {
    if (!early || unit != own || from > 0) ask_unit(unit, from);
    #pragma unroll
    for (int i = 0; i < BATCH; i++)
      if (from + i < LOADS) {
        left += product_of<N, SIZE>(one[i], line, from + i);
        right += product_of<N, SIZE>(other[i], line, from + i);
      }
  }
  left = whole_sum(left);
  right = whole_sum(right);
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
if (!wait_for_all<GIVES_UP>(barrier, (N*)out, SIZE)) return;
barrier.end();
read_token(inner, SLOTS * WIDTH, line);
constexpr int JOBS = SLOTS * WIDTH_LOADS;
#pragma unroll 1
for (int row = own; row < SIZE; row += ALL) {
  float sum[SLOTS] = {};
  #pragma unroll
  for (int from = 0; from < JOBS; from += DOWN_BATCH) {
    uint4 some[DOWN_BATCH];
    #pragma unroll
    for (int i = 0; i < DOWN_BATCH; i++)
      if (from + i < JOBS)
        some[i] = load_of<N, WIDTH>(down_row((from + i) / WIDTH_LOADS, row), (from + i) % WIDTH_LOADS);
    #pragma unroll
    for (int i = 0; i < DOWN_BATCH; i++)
      if (from + i < JOBS) {
        const int slot = (from + i) / WIDTH_LOADS;
        sum[slot] += product_of<N, WIDTH>(some[i], line + slot * (WIDTH / 8), (from + i) % WIDTH_LOADS);
      }
  }
  float made = 0;
  N rounded;
  #pragma unroll
  for (int slot = 0; slot < SLOTS; slot++) sum[slot] = whole_sum(sum[slot]);
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

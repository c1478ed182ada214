// The mixture of experts with quantised weights of one token, in one launch as in expert_token.cu: out [1, SIZE] =
// the RESIDUAL, if any, + the weighted sum of down(activation(gate, up)) of the chosen experts of the norm of x [1, SIZE]
// with `gain`. Weights and biases, if they are BIASED, are as in expert_product_few.cu. A warp has the logit of an
// expert, then strips of eight gates and their ups. A thread block has strips of 16 rows of all downs, and each of its
// warps has one of PARTS of their columns for an expert; the first strips are loaded before the second barrier.
// All eight columns of a product of tensor cores are the token. Numbers are rounded as by the separate kernels.
// `memory`: the state of the barrier, the logits [EXPERTS], and the activations [CHOSEN, WIDTH].
constexpr int EACH = (EXPERTS + 31) / 32, ALL = TOKEN_WARPS * BLOCKS;
constexpr int STEPS = SIZE / 64, STRIPS = WIDTH / 8;  // of 64 columns in a row; strips of gates and ups of an expert
constexpr int DOWN_STEPS = WIDTH / 64, DOWN_STRIPS = SIZE / 16;
constexpr int PARTS = CHOSEN < TOKEN_WARPS ? TOKEN_WARPS / CHOSEN : 1, JOBS = CHOSEN * PARTS;
constexpr int PART = (DOWN_STEPS + PARTS - 1) / PARTS;  // steps of a job
constexpr int HELD = 80 / (BITS + FACTORS / 4);  // steps in registers
constexpr int DEEP = HELD < 15 ? HELD : 15;
constexpr float TINY = 1e-20f, NONE = -3e38f;
extern __shared__ uint4 space[];
uint4* const line = space;  // the normed token, then the activations
float* const scores = (float*)(line + (SIZE > CHOSEN * WIDTH ? SIZE : CHOSEN * WIDTH) / 8);  // [EXPERTS]
float* const sums = scores + EXPERTS;  // [TOKEN_WARPS]
float* const weights = sums + TOKEN_WARPS;  // [CHOSEN]
float* const partial = weights + CHOSEN;  // [JOBS, 16], of a strip of downs
int* const experts = (int*)(partial + JOBS * 16);  // [CHOSEN]
const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, own = warp * BLOCKS + blockIdx.x;
float* const logits = (float*)memory + 4;
N* const inner = (N*)(logits + (EXPERTS + 3) / 4 * 4);
GridBarrier barrier((unsigned*)memory, (bool*)(experts + CHOSEN));
const unsigned held = held_pair<N>(gridDim.x);
const int factors_at = WORDS + lane / 4 * FACTORS - lane * 16;
Fragment ahead[DEEP];
auto load = [&](int d, const char* from) {
  #pragma unroll
  for (int i = 0; i < BITS / 4; i++) load_once(ahead[d].words[i], from + i * 512);
  load_once(ahead[d].factors, from + factors_at);
};
// Loads the first DEEP of `count` steps of a strip; `from` has this lane's offset.
auto ask = [&](const char* from, int count) {
  #pragma unroll
  for (int d = 0; d < DEEP; d++)
    if (d < count) load(d, from + d * FRAGMENT);
};
// Adds to `sum` the products of the loaded strip with the numbers at `with`.
auto multiply = [&](const char* from, int count, const unsigned* with, float (&sum)[4]) {
  unsigned left = count;
  hold(left);  // see expert_product_few.cu
  float other[4] = {};
  with += lane % 4;
  #pragma unroll 1
  while (left > 0) {
    from += DEEP * FRAGMENT;
    #pragma unroll
    for (int d = 0; d < DEEP && left > 0; d++) {
      #pragma unroll
      for (int j = 0; j < 4; j++) {
        unsigned a[4];
        open_columns<N>(ahead[d], j, held, a);
        mma(j % 2 ? other : sum, a, with[j * 8], with[j * 8 + 4], N());
      }
      if (left > DEEP) load(d, from + d * FRAGMENT);
      left--;
      with += 32;
    }
  }
  #pragma unroll
  for (int i = 0; i < 4; i++) sum[i] += other[i];
};
TokenRows<N, SIZE, EXPERTS, ALL> router;
auto router_row = [&](int expert) { return (const N*)gate + (long)expert * SIZE; };
router.ask(own, 0, router_row);
norm_token<N, SIZE>((const N*)x, (const N*)gain, EPS, line, sums);
router.multiply(own, router_row, [&](int) { return line; }, [&](int expert, float sum) {
  if (lane == 0) logits[expert] = sum;
});
barrier.arrive();
if (!wait_for_all<GIVES_UP>(barrier, (N*)out, SIZE)) return;
#include TOKEN_CHOICE
#pragma unroll 1
for (int unit = own; unit < CHOSEN * STRIPS; unit += ALL) {
  const int slot = unit / STRIPS, strip = unit % STRIPS;
  const char* const from = (const char*)gate_up + ((long)experts[slot] * STRIPS + strip) * STEPS * FRAGMENT + lane * 16;
  ask(from, STEPS);
  const int row = strip * 8 + lane / 4;
  const long biases_at = (long)experts[slot] * 2 * WIDTH + row;
  const float one = BIASED ? up(gate_up_bias[biases_at]) : 0.f, other = BIASED ? up(gate_up_bias[biases_at + WIDTH]) : 0.f;
  float sum[4] = {};
  multiply(from, STEPS, (const unsigned*)line, sum);
  if (lane % 4 == 0) down(activated(sum[0] + one, sum[2] + other, LIMIT, N()), inner + slot * WIDTH + row);
}
auto strip_of = [&](int strip, int job) -> const char* {
  const long at = (long)experts[job / PARTS] * DOWN_STRIPS + strip;
  return (const char*)down_weight + (at * DOWN_STEPS + job % PARTS * PART) * FRAGMENT + lane * 16;
};
auto steps_of = [&](int job) -> int { return max(0, min(PART, DOWN_STEPS - job % PARTS * PART)); };
int strip = blockIdx.x;
if (strip < DOWN_STRIPS && warp < JOBS) ask(strip_of(strip, warp), steps_of(warp));
barrier.arrive();
if (!wait_for_all<GIVES_UP>(barrier, (N*)out, SIZE)) return;
barrier.end();
read_token(inner, CHOSEN * WIDTH, line);
#pragma unroll 1
for (; strip < DOWN_STRIPS; strip += BLOCKS) {
  #pragma unroll 1
  for (int job = warp; job < JOBS; job += TOKEN_WARPS) {
    float sum[4] = {};
    const int column = job / PARTS * WIDTH + job % PARTS * PART * 64;
    multiply(strip_of(strip, job), steps_of(job), (const unsigned*)line + column / 2, sum);
    if (lane % 4 == 0) {
      partial[job * 16 + lane / 4] = sum[0];
      partial[job * 16 + lane / 4 + 8] = sum[2];
    }
    const bool again = job + TOKEN_WARPS < JOBS;
    const int next = again ? job + TOKEN_WARPS : warp, its = again ? strip : strip + BLOCKS;
    if (its < DOWN_STRIPS) ask(strip_of(its, next), steps_of(next));
  }
  __syncthreads();
  if (threadIdx.x < 16) {
    const int row = strip * 16 + threadIdx.x;
    float made = 0;
    N rounded;
    #pragma unroll
    for (int slot = 0; slot < CHOSEN; slot++) {
      float sum = BIASED ? up(down_bias[(long)experts[slot] * SIZE + row]) : 0.f;
      #pragma unroll
      for (int part = 0; part < PARTS; part++) sum += partial[(slot * PARTS + part) * 16 + threadIdx.x];
      down(sum, &rounded);
      made += weights[slot] * up(rounded);
    }
    if (RESIDUAL) {
      down(made, &rounded);
      made = up(rounded) + up(((const N*)residual)[row]);
    }
    down(made, (N*)out + row);
  }
  __syncthreads();  // `partial` has been read
}

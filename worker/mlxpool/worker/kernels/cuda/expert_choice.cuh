// A warp chooses the experts of a line. Afterwards lane n < CHOSEN has the n-th best expert, `chosen`, and its `weight`;
// of equal scores the lower expert is better. `mine` [EXPERTS] are the line's logits in shared memory; the warp overwrites
// them. Lane l has the numbers `added` to the logits of experts l, l + 32 and so on in `addition` [EACH]. NONE is less
// than any number, TINY is added to a sum of sigmoids, against a division by zero.
// A number's place in the order of floats, above 0; 0 is an expert that cannot be chosen (again).
auto key_of = [](float x) -> unsigned {
  const unsigned bits = __float_as_uint(x + 0.f);
  return max(bits >> 31 ? ~bits : bits | 1u << 31, 1u);
};
unsigned key[EACH];
float total = 0;
if (SIGMOID) {
  auto ranked = [&](int expert) -> float {
    return mine[expert] + (ADDED ? up(added[expert]) : 0.f);
  };
  #pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int expert = i * 32 + lane;
    if (expert < EXPERTS) mine[expert] = 1 / (1 + expf(-mine[expert]));
  }
  __syncwarp();
  unsigned usable = ~0u;  // groups, by bits
  if (CHOSEN_GROUPS < GROUPS) {
    constexpr int SIZE = EXPERTS / GROUPS;
    float best = NONE, second = NONE;
    for (int i = 0; lane < GROUPS && i < SIZE; i++) {
      const float one = ranked(lane * SIZE + i);
      second = fmaxf(second, fminf(best, one));
      best = fmaxf(best, one);
    }
    const unsigned own = lane < GROUPS ? key_of(best + second) : 0;
    int better = 0;
    for (int other = 0; other < GROUPS; other++) {
      const unsigned its = __shfl_sync(0xffffffff, own, other);
      better += its > own || (its == own && other < lane);
    }
    usable = __ballot_sync(0xffffffff, lane < GROUPS && better < CHOSEN_GROUPS);
  }
  #pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int expert = i * 32 + lane;
    key[i] = 0;
    if (expert < EXPERTS)
      key[i] = key_of(usable >> expert / (EXPERTS / GROUPS) & 1 ? mine[expert] + addition[i] : 0.f);
  }
} else {
  float most = NONE, own[EACH];
  #pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int expert = i * 32 + lane;
    own[i] = expert < EXPERTS ? mine[expert] + addition[i] : NONE;
    key[i] = expert < EXPERTS ? key_of(own[i]) : 0;
    most = fmaxf(most, own[i]);
  }
  #pragma unroll
  for (int other = 1; other < 32; other *= 2)
    most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, other));
  #pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int expert = i * 32 + lane;
    const float power = expf(own[i] - most);
    total += expert < EXPERTS ? power : 0.f;
    if (expert < EXPERTS) mine[expert] = power;
  }
  #pragma unroll
  for (int other = 1; other < 32; other *= 2) total += __shfl_xor_sync(0xffffffff, total, other);
}
__syncwarp();
int chosen = 0;
float weight = 0;  // of the choice with this lane's number
#pragma unroll 1
for (int n = 0; n < CHOSEN; n++) {
  unsigned best = 0;
  int at = 0;
  #pragma unroll
  for (int i = 0; i < EACH; i++)
    if (key[i] > best) best = key[i], at = i;
  const unsigned top = __reduce_max_sync(0xffffffff, best);
  const int expert = __reduce_min_sync(0xffffffff, best == top ? at * 32u + lane : ~0u);
  #pragma unroll
  for (int i = 0; i < EACH; i++)
    if (i * 32 + lane == expert) key[i] = 0;
  if (lane == n) chosen = expert, weight = mine[expert];
}
if (NORMED) {
  total = weight;
  #pragma unroll
  for (int other = 1; other < 32; other *= 2) total += __shfl_xor_sync(0xffffffff, total, other);
  if (SIGMOID) total += TINY;
}
if (NORMED || !SIGMOID) weight /= total;
weight *= FACTOR;

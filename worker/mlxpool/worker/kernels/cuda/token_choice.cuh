// One token's choice of experts in a kernel whose thread blocks wait for each other. All warps have computed `logits`
// [EXPERTS] before the last barrier. Each thread block chooses: `experts` [CHOSEN] and their `weights`.
for (int i = threadIdx.x; i < EXPERTS; i += TOKEN_THREADS) scores[i] = __ldcg(logits + i);
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

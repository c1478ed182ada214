// The weighted sum of the outputs of a line's experts, rounded once. Then the output of the shared expert is added
// (SHARED: after all choices in `made`; BESIDE: in a separate array), and then, if ADDED, `residual`.
// made [choices, SIZE], the weights are in `plan` (expert_routing.cu). A thread makes eight numbers of a line.
const int all = made_shape[0] / (CHOSEN + SHARED);
const long i = (long)blockIdx.x * blockDim.x + threadIdx.x;
if (i < (long)all * (SIZE / 8)) {
  const long line = i / (SIZE / 8), piece = i % (SIZE / 8);
  const Some<N, 8>* const from = (const Some<N, 8>*)made + piece;
  const float* const weights = (const float*)plan + 4 + line * CHOSEN;
  float sum[8] = {};
  #pragma unroll
  for (int n = 0; n < CHOSEN; n++) {
    const Some<N, 8> some = from[(line * CHOSEN + n) * (SIZE / 8)];
    const float weight = weights[n];
    #pragma unroll
    for (int at = 0; at < 8; at++) sum[at] += weight * up(some.n[at]);
  }
  Some<N, 8> whole;
  #pragma unroll
  for (int at = 0; at < 8; at++) down(sum[at], &whole.n[at]);
  if (SHARED || BESIDE) {
    const Some<N, 8> more = SHARED ? from[((long)all * CHOSEN + line) * (SIZE / 8)]
                                   : ((const Some<N, 8>*)beside)[i];
    #pragma unroll
    for (int at = 0; at < 8; at++) down(up(whole.n[at]) + up(more.n[at]), &whole.n[at]);
  }
  if (ADDED) {
    const Some<N, 8> more = ((const Some<N, 8>*)residual)[i];
    #pragma unroll
    for (int at = 0; at < 8; at++) down(up(whole.n[at]) + up(more.n[at]), &whole.n[at]);
  }
  ((Some<N, 8>*)out)[i] = whole;
}

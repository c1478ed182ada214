__device__ inline float silu(float x) { return __fdividef(x, __fadd_rn(1, expf(-x))); }
// The gated norm after a scan: VALUE numbers of a head divided by their root mean square, times `gain`
// and silu of the gates. A warp computes it; each lane reads numbers lane, lane + 32, ... of x.
template <int VALUE, typename N>
__device__ inline void gated_norm(const float* x, const N* gates, const float* gain, float eps, N* to, int lane) {
  float own[VALUE / 32], squares = 0;
  #pragma unroll
  for (int j = 0; j < VALUE / 32; j++) {
    own[j] = x[j * 32 + lane];
    squares = fmaf(own[j], own[j], squares);
  }
  #pragma unroll
  for (int o = 16; o > 0; o >>= 1) squares += __shfl_xor_sync(0xffffffff, squares, o);
  const float factor = rsqrtf(__fadd_rn(squares / VALUE, eps));
  #pragma unroll
  for (int j = 0; j < VALUE / 32; j++) {
    down(own[j] * factor * gain[j * 32 + lane] * silu(up(gates[j * 32 + lane])), to + j * 32 + lane);
  }
}

// The activation of gate and up: silu(gate) * up, or with a limit above 0 the activation of gpt-oss: it clamps its
// inputs, has a steeper sigmoid, and up + 1 in place of up.
template <typename N> __device__ inline float activated(float gate, float beside, float limit, N rounded) {
  if (limit <= 0) return gated(gate, beside, rounded);
  gate = fminf(gate, limit);
  beside = fminf(fmaxf(beside, -limit), limit);
  return __fdividef((beside + 1) * gate, 1 + power2(-1.702f * 1.44269504f * gate));
}

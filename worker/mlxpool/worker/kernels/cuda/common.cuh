#include <cuda_bf16.h>
#include <cuda_fp16.h>
__device__ inline float up(float x) { return x; }
__device__ inline float up(__half x) { return __half2float(x); }
__device__ inline float up(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline void down(float x, float* to) { *to = x; }
__device__ inline void down(float x, __half* to) { *to = __float2half(x); }
__device__ inline void down(float x, __nv_bfloat16* to) { *to = __float2bfloat16(x); }
template <typename N, int COUNT> struct alignas(sizeof(N) * COUNT) Some { N n[COUNT]; };
// silu(gate) * beside, rounded like the separate operations.
template <typename N> __device__ inline float gated(float gate, float beside, N rounded) {
  down(gate, &rounded);
  gate = up(rounded);
  down(beside, &rounded);
  return gate / (1 + expf(-gate)) * up(rounded);
}
// The result of row `at` of a product: if BIASED, plus `bias` [rows of the weight]; if GATED, row `at` is a gate, and
// `other` belongs to row `at` + OUT.
template <bool GATED, bool BIASED, typename N>
__device__ inline float result_of(float one, float other, const N* bias, long at, long OUT) {
  if (BIASED) one += up(bias[at]);
  if (!GATED) return one;
  return gated(one, BIASED ? other + up(bias[OUT + at]) : other, N());
}
// A number of a head after rotation; `cosines` and `sines` belong to the head's line.
template <typename N, int TURNED, bool TRADITIONAL>
__device__ inline float rotated(const N* numbers, long stride, int d, const float* cosines, const float* sines) {
  constexpr int HALF = TURNED > 0 ? TURNED / 2 : 1;
  const float x = up(numbers[d * stride]);
  if (d >= TURNED) return x;
  const int i = TRADITIONAL ? d / 2 : d % HALF;
  const bool second = TRADITIONAL ? d % 2 : d >= HALF;
  const float y = up(numbers[(TRADITIONAL ? d ^ 1 : second ? d - HALF : d + HALF) * stride]);
  return second ? x * cosines[i] + y * sines[i] : x * cosines[i] - y * sines[i];
}

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

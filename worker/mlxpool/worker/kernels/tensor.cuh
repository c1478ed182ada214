__device__ inline unsigned pair(float low, float high, __half) {
  __half2 both = __floats2half2_rn(low, high);
  return *(unsigned*)&both;
}
__device__ inline unsigned pair(float low, float high, __nv_bfloat16) {
  __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return *(unsigned*)&both;
}
__device__ inline __half2 twice(__half x) { return __half2half2(x); }
__device__ inline __nv_bfloat162 twice(__nv_bfloat16 x) { return __bfloat162bfloat162(x); }
// The lowest four bits of both halves of a word as numbers, scaled and moved. They stand first in the
// fraction of 1,024, or of 128, which is then taken away.
__device__ inline unsigned fours(unsigned word, __half2 scale, __half2 bias) {
  word = word & 0x000f000f | 0x64006400;
  __half2 both = __hfma2(__hsub2(*(__half2*)&word, __float2half2_rn(1024.f)), scale, bias);
  return *(unsigned*)&both;
}
__device__ inline unsigned fours(unsigned word, __nv_bfloat162 scale, __nv_bfloat162 bias) {
  word = word & 0x000f000f | 0x43004300;
  __nv_bfloat162 both = __hfma2(
      __hsub2(*(__nv_bfloat162*)&word, __float2bfloat162_rn(128.f)), scale, bias);
  return *(unsigned*)&both;
}

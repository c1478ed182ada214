// c += a * b of 16 x 16 and 16 x 8 numbers, as mma.m16n8k16 has them in a warp's registers.
__device__ inline void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, __half) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ inline void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, __nv_bfloat16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
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

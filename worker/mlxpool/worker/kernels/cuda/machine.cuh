// What has no name in C++: each instruction of the GPU that our kernels ask for by its own.
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
// Brings 128 bytes as near as the second cache.
__device__ inline void prefetch(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}
// Where memory that a thread block shares lies for the instructions below.
__device__ inline unsigned shared_at(const void* space) {
  return (unsigned)__cvta_generic_to_shared(space);
}
// Copies 16 bytes, or BYTES that are fewer, to shared memory some time before `copies_arrived_but` says so.
__device__ inline void copy(unsigned to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from));
}
template <int BYTES> __device__ inline void copy_few(unsigned to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES));
}
// Ends a group of copies; all groups but the last COUNT have arrived.
__device__ inline void copies_asked() { asm volatile("cp.async.commit_group;"); }
template <int COUNT> __device__ inline void copies_arrived_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(COUNT) : "memory");
}
// Products of four warps, which read shared memory by themselves: what was copied is theirs, the
// next ones begin, and all but the last COUNT are done.
__device__ inline void shown_to_products() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ inline void products_begin() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
template <int COUNT> __device__ inline void products_done_but() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(COUNT) : "memory");
}
__device__ inline void products_asked() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

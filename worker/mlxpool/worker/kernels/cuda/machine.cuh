// The GPU instructions that our kernels use and that C++ has no function for.
// c += a * b of 16 x 16 and 16 x 8 numbers, in a warp's registers as mma.m16n8k16 expects them.
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
// c += a * b of 16 x 32 unsigned and 32 x 8 signed integers of 8 bits.
__device__ inline void mma_integers(int (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Loads four matrices of 8 x 8 halves from shared memory: lane l gives the address of row l % 8 of matrix
// l / 8, and gets numbers 2 * (l % 4) and the next of row l / 4 of each. Transposed: of the columns.
__device__ inline void load_matrices(unsigned (&to)[4], unsigned from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from));
}
__device__ inline void load_transposed(unsigned (&to)[4], unsigned from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from));
}
// 2 to the power of x, with a relative error of 2^-22; tiny results are 0.
__device__ inline float power2(float x) {
  float found;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(found) : "f"(x));
  return found;
}
// Prefetches 128 bytes into the second-level cache.
__device__ inline void prefetch(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}
// Loads words that nothing else will read, in the order of the text: early loads stay early.
__device__ inline void load_once(unsigned (&to)[4], const void* from) {
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "l"(from));
}
__device__ inline void load_once(unsigned (&to)[2], const void* from) {
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "l"(from));
}
__device__ inline void load_once(unsigned (&to)[1], const void* from) {
  asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(to[0]) : "l"(from));
}
// Waits for COUNT threads of a thread block that call it with the same `number`, from 1 to 15.
template <int COUNT> __device__ inline void sync_team(int number) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(COUNT) : "memory");
}
// Lets threads of `sync_team` with this number go on, without waiting for them.
template <int COUNT> __device__ inline void arrive_team(int number) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "n"(COUNT) : "memory");
}
// Adds 1 to a counter of all thread blocks. A thread that reads the counter by `load_acquire` afterwards sees all
// earlier writes of this thread, and those of others in its block that it has synchronised with.
__device__ inline void add_release(unsigned* counter) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}
__device__ inline unsigned load_acquire(const unsigned* counter) {
  unsigned found;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(found) : "l"(counter) : "memory");
  return found;
}
// The address of shared memory for the instructions below.
__device__ inline unsigned shared_address(const void* space) {
  return (unsigned)__cvta_generic_to_shared(space);
}
// Copies 16 bytes, or fewer with BYTES, to shared memory asynchronously; see `wait_copies`.
__device__ inline void copy(unsigned to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from));
}
template <int BYTES> __device__ inline void copy_bytes(unsigned to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES));
}
// Commits a group of copies; waits for all groups but the last COUNT.
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;"); }
template <int COUNT> __device__ inline void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(COUNT) : "memory");
}
// Asynchronous products of four warps: makes copied shared memory visible to them, begins products,
// waits for all committed groups but the last COUNT, commits a group.
__device__ inline void fence_products() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ inline void begin_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
template <int COUNT> __device__ inline void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(COUNT) : "memory");
}
__device__ inline void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Keeps the compiler from using sums before the products that the lines above wait for.
template <int COUNT> __device__ inline void hold(float (&sums)[COUNT]) {
  #pragma unroll
  for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(sums[i])::"memory");
}
// Keeps the compiler from using a word before the waits above.
__device__ inline void hold(unsigned& word) { asm volatile("" : "+r"(word)::"memory"); }
// Words of 16 bytes, 8 of data and a tag, which GPUs write into each other's memory: a word arrives whole.
__device__ inline void store_word(void* to, unsigned long data, unsigned long tag) {
  asm volatile("{ .reg .b128 w; mov.b128 w, {%1, %2}; st.relaxed.sys.global.b128 [%0], w; }"
               ::"l"(to), "l"(data), "l"(tag) : "memory");
}
__device__ inline void load_word(const void* from, unsigned long& data, unsigned long& tag) {
  asm volatile("{ .reg .b128 w; ld.relaxed.sys.global.b128 w, [%2]; mov.b128 {%0, %1}, w; }"
               : "=l"(data), "=l"(tag) : "l"(from) : "memory");
}
// The 16 bytes of a lane in a line of 128, which eight lanes write and read at once. Over NVLink a line arrives
// whole. `tagged`: this lane is the last of a line, and its second word is the tag. `load_line` returns whether this
// lane has seen the line come: it has come if all its lanes return true.
__device__ inline void store_line(void* to, bool tagged, unsigned long first, unsigned long second) {
  asm volatile("st.volatile.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(first), "l"(second) : "memory");
}
__device__ inline bool load_line(const void* from, bool tagged, unsigned long tag, unsigned long (&words)[2]) {
  asm volatile("ld.volatile.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(words[0]), "=l"(words[1]) : "l"(from) : "memory");
  return !tagged || words[1] == tag;
}
// A flag in the memory of any GPU: its readers also see all that this block wrote before its last barrier.
__device__ inline void release_flag(unsigned long* to, unsigned long tag) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(to), "l"(tag) : "memory");
}
__device__ inline unsigned long acquired_flag(const unsigned long* from) {
  unsigned long tag;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(tag) : "l"(from) : "memory");
  return tag;
}
// The GPU's clock, which goes on while nothing runs; the next poll of a wait may begin.
__device__ inline long nanoseconds() {
  long now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}
__device__ inline void next_poll() {}

// A simulated GPU: as much of CUDA C++ as our kernels use.
//
// The threads of a block are fibers of one thread, which run until they wait for each other; blocks run
// one after the other, or all of them together where a kernel has them wait for each other; every second
// launch runs threads and blocks in reverse order. Numbers are rounded
// as on a GPU; the sums of a product may be in another order. Asynchronous copies to shared memory arrive
// as late as allowed, so that a missing wait is found.
// It includes few headers: each kernel's compilation reads all of them again.
#pragma once
#include <sched.h>
#include <setjmp.h>
#include <time.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <vector>

#define __device__
#define __shared__ static
#define alignas(bytes)  // MLX does not align memory on a CPU
#define __expf expf
#define __logf logf
#define __fdividef(a, b) ((a) / (b))
#define __fadd_rn(a, b) ((a) + (b))

namespace simt {

constexpr int LANES = 32, STACK = 256 * 1024, FIRST = 16;

struct Dim {
  unsigned x = 0, y = 0, z = 0;
};

struct Barrier {
  int members = 0, arrived = 0;
  unsigned generation = 0;
};

struct Warp {
  Barrier barrier;
  __attribute__((aligned(16))) char told[2][LANES][64];
};

struct Copy {
  char* to;
  const char* from;
  int bytes;
};

// A thread block. `named` are the barriers of some of its threads.
struct Block {
  Dim index;
  Barrier barrier, named[16];
  std::vector<Warp> warps;
  int votes[2] = {0, 0};
  char* shared = nullptr;
};

struct Thread {
  Dim index;
  Block* home = nullptr;
  int number = 0;
  unsigned exchanges = 0, votes = 0;
  bool started = false, over = false;
  ucontext_t context;
  jmp_buf jump;
  std::vector<Copy> asked;
  std::vector<std::vector<Copy>> groups;
};

static std::vector<Thread> threads;
static std::vector<Block> blocks;  // that run at a time
static char* stacks;  // of `threads`
static Thread* here;
static jmp_buf done;
static int alive, waits;
static long long ticks;  // of the clock
static char* shared;  // of the block of `here`
static bool backwards;
static void (*entry)();

// Switches to the next thread that has not ended.
[[noreturn]] static void go_on() {
  int next = here - threads.data();
  do next = (next + (backwards ? threads.size() - 1 : 1)) % threads.size();
  while (threads[next].over);
  here = &threads[next];
  shared = here->home->shared;
  if (here->started) _longjmp(here->jump, 1);
  here->started = true;
  setcontext(&here->context);
  abort();
}

static void release(Barrier& barrier) {
  barrier.arrived = 0;
  barrier.generation++;
  waits = 0;
}

__attribute__((noinline)) static void wait(Barrier& barrier) {
  const unsigned generation = barrier.generation;
  if (++barrier.arrived == barrier.members) return release(barrier);
  while (barrier.generation == generation) {
    if (++waits > 4 * (int)threads.size()) _longjmp(done, 2);  // no thread can continue
    if (!_setjmp(here->jump)) go_on();
  }
}

// Lets the other threads go on: this one waits for what they write.
__attribute__((noinline)) static void pause() {
  waits = 0;
  if (!_setjmp(here->jump)) go_on();
}

static Warp& warp_of(const Thread& thread) { return thread.home->warps[thread.number / LANES]; }

static void leave(Barrier& barrier) {
  if (--barrier.members && barrier.arrived == barrier.members) release(barrier);
}

static void thread_main() {
  entry();
  here->over = true;
  leave(here->home->barrier);
  leave(warp_of(*here).barrier);
  if (--alive == 0) _longjmp(done, 1);
  go_on();
}

// The values that the lanes of a warp exchange at one instruction.
template <typename T> struct Told {
  const char (*lanes)[64];
  const T& operator[](int lane) const { return *(const T*)lanes[lane]; }
};
template <typename T> Told<T> told(const T& mine) {
  static_assert(sizeof(T) <= 64);
  Warp& warp = warp_of(*here);
  auto* lanes = warp.told[here->exchanges++ % 2];
  memcpy(lanes[here->number % LANES], &mine, sizeof(T));
  wait(warp.barrier);
  return {lanes};
}

static int vote(int mine) {
  int& sum = here->home->votes[here->votes++ % 2];
  sum += mine;
  wait(here->home->barrier);
  const int found = sum;
  wait(here->home->barrier);
  sum = 0;
  return found;
}

}  // namespace simt

static simt::Dim blockDim, gridDim;
#define threadIdx (simt::here->index)
#define blockIdx (simt::here->home->index)

// ---- numbers -------------------------------------------------------------------------------------

struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct float4 { float x, y, z, w; };
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }

struct __half { uint16_t bits; };
struct __nv_bfloat16 { uint16_t bits; };
struct __half2 { __half x, y; };
struct __nv_bfloat162 { __nv_bfloat16 x, y; };

static inline unsigned __float_as_uint(float x) {
  unsigned bits;
  memcpy(&bits, &x, 4);
  return bits;
}
static inline float __uint_as_float(unsigned bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
static inline float __bfloat162float(__nv_bfloat16 x) { return __uint_as_float((unsigned)x.bits << 16); }
static inline __nv_bfloat16 __float2bfloat16(float x) {
  const unsigned bits = __float_as_uint(x);
  if (x != x) return {0x7fff};
  return {(uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
static inline float __half2float(__half x) {
  const int exponent = x.bits >> 10 & 31, fraction = x.bits & 1023;
  const float sign = x.bits & 0x8000 ? -1.f : 1.f;
  if (exponent == 31) return fraction ? NAN : sign * INFINITY;
  return sign * (exponent ? ldexpf(1024 + fraction, exponent - 25) : ldexpf(fraction, -24));
}
static inline __half __float2half(float x) {
  if (x != x) return {0x7fff};
  const uint16_t sign = __float_as_uint(x) >> 31 << 15;
  const float size = fabsf(x);
  if (size >= 65520.f) return {(uint16_t)(sign | 0x7c00)};
  if (size < ldexpf(1, -14)) return {(uint16_t)(sign | (int)nearbyintf(ldexpf(size, 24)))};
  int exponent;
  const float fraction = frexpf(size, &exponent);  // [0.5, 1)
  const int bits = (int)nearbyintf(ldexpf(fraction, 11));
  return {(uint16_t)(sign | (((exponent + 13) << 10) + bits))};
}
static inline __half2 __half2half2(__half x) { return {x, x}; }
static inline __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 x) { return {x, x}; }
static inline __half2 __floats2half2_rn(float x, float y) { return {__float2half(x), __float2half(y)}; }
static inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {__float2bfloat16(x), __float2bfloat16(y)};
}
static inline __half2 __float2half2_rn(float x) { return __floats2half2_rn(x, x); }
static inline __nv_bfloat162 __float2bfloat162_rn(float x) { return __floats2bfloat162_rn(x, x); }
static inline __half2 __hsub2(__half2 a, __half2 b) {
  return __floats2half2_rn(__half2float(a.x) - __half2float(b.x), __half2float(a.y) - __half2float(b.y));
}
static inline __half2 __hmul2(__half2 a, __half2 b) {
  return __floats2half2_rn(__half2float(a.x) * __half2float(b.x), __half2float(a.y) * __half2float(b.y));
}
static inline __nv_bfloat162 __hmul2(__nv_bfloat162 a, __nv_bfloat162 b) {
  return __floats2bfloat162_rn(__bfloat162float(a.x) * __bfloat162float(b.x),
                               __bfloat162float(a.y) * __bfloat162float(b.y));
}
static inline __nv_bfloat162 __hsub2(__nv_bfloat162 a, __nv_bfloat162 b) {
  return __floats2bfloat162_rn(__bfloat162float(a.x) - __bfloat162float(b.x),
                               __bfloat162float(a.y) - __bfloat162float(b.y));
}
static inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
  return __floats2half2_rn(fmaf(__half2float(a.x), __half2float(b.x), __half2float(c.x)),
                           fmaf(__half2float(a.y), __half2float(b.y), __half2float(c.y)));
}
static inline __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {
  return __floats2bfloat162_rn(
      fmaf(__bfloat162float(a.x), __bfloat162float(b.x), __bfloat162float(c.x)),
      fmaf(__bfloat162float(a.y), __bfloat162float(b.y), __bfloat162float(c.y)));
}

template <typename A, typename B> std::common_type_t<A, B> min(A a, B b) {
  using C = std::common_type_t<A, B>;
  return (C)a < (C)b ? (C)a : (C)b;
}
template <typename A, typename B> std::common_type_t<A, B> max(A a, B b) {
  using C = std::common_type_t<A, B>;
  return (C)a > (C)b ? (C)a : (C)b;
}
using std::isfinite;
static inline float rsqrtf(float x) { return 1 / sqrtf(x); }
static inline unsigned __byte_perm(unsigned x, unsigned y, unsigned which) {
  const uint64_t both = (uint64_t)y << 32 | x;
  unsigned found = 0;
  for (int i = 0; i < 4; i++) found |= (unsigned)(both >> 8 * (which >> 4 * i & 7) & 255) << 8 * i;
  return found;
}
static inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) {
  const uint64_t both = (uint64_t)high << 32 | low;
  return (unsigned)(both << (by & 31) >> 32);
}

// ---- threads together ----------------------------------------------------------------------------

static inline void __syncthreads() { simt::wait(simt::here->home->barrier); }
static inline void __syncwarp() { simt::wait(simt::warp_of(*simt::here).barrier); }
static inline int __syncthreads_or(int x) { return simt::vote(x != 0) != 0; }
static inline int __syncthreads_count(int x) { return simt::vote(x != 0); }
template <typename T> T __shfl_xor_sync(unsigned, T x, int mask) {
  return simt::told(x)[simt::here->number % simt::LANES ^ mask];
}
template <typename T> T __shfl_sync(unsigned, T x, int lane) { return simt::told(x)[lane]; }
static inline int __any_sync(unsigned, int x) {
  const auto found = simt::told(x);
  for (int lane = 0; lane < simt::LANES; lane++)
    if (found[lane]) return 1;
  return 0;
}
static inline int __all_sync(unsigned mask, int x) { return !__any_sync(mask, !x); }
static inline unsigned __ballot_sync(unsigned, int x) {
  const auto found = simt::told(x);
  unsigned bits = 0;
  for (int lane = 0; lane < simt::LANES; lane++) bits |= (unsigned)(found[lane] != 0) << lane;
  return bits;
}
static inline unsigned __match_any_sync(unsigned, int x) {
  const auto found = simt::told(x);
  unsigned bits = 0;
  for (int lane = 0; lane < simt::LANES; lane++) bits |= (unsigned)(found[lane] == x) << lane;
  return bits;
}
static inline unsigned __reduce_max_sync(unsigned, unsigned x) {
  const auto found = simt::told(x);
  for (int lane = 0; lane < simt::LANES; lane++) x = found[lane] > x ? found[lane] : x;
  return x;
}
static inline unsigned __reduce_min_sync(unsigned, unsigned x) {
  const auto found = simt::told(x);
  for (int lane = 0; lane < simt::LANES; lane++) x = found[lane] < x ? found[lane] : x;
  return x;
}
static inline int __reduce_add_sync(unsigned, int x) {
  const auto found = simt::told(x);
  int sum = 0;
  for (int lane = 0; lane < simt::LANES; lane++) sum += found[lane];
  return sum;
}
static inline int __float2int_rn(float x) { return x == x ? (int)lrintf(x) : 0; }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
template <typename T> T __shfl_up_sync(unsigned, T x, int by) {
  const int lane = simt::here->number % simt::LANES;
  return simt::told(x)[lane < by ? lane : lane - by];
}
template <typename T> T atomicAdd(T* at, T more) {
  const T before = *at;
  *at += more;
  return before;
}
static inline void __threadfence() {}
// The clock is fast: what waits for it ends soon, and what waits for other threads never needs so long.
static inline long long clock64() { return simt::ticks += 1 << 18; }
static inline void __trap() { _longjmp(simt::done, 4); }
struct alignas(8) float2 { float x, y; };
template <typename T> T __ldcg(const T* from) { return *from; }

// ---- machine.cuh ---------------------------------------------------------------------------------

static inline float opened(uint16_t bits, __half) { return __half2float({bits}); }
static inline float opened(uint16_t bits, __nv_bfloat16) { return __bfloat162float({bits}); }

template <typename N> void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, N) {
  struct Words {
    float a[4][2], b[2][2];
  } mine;
  const unsigned b[2] = {b0, b1};
  for (int i = 0; i < 2; i++) {
    for (int n = 0; n < 4; n++) mine.a[n][i] = opened(a[n] >> 16 * i, N());
    for (int n = 0; n < 2; n++) mine.b[n][i] = opened(b[n] >> 16 * i, N());
  }
  const auto told = simt::told(mine);
  const int lane = simt::here->number % simt::LANES, line = lane / 4, quarter = lane % 4;
  for (int i = 0; i < 4; i++)
    for (int k = 0; k < 16; k++)
      c[i] += told[line * 4 + k % 8 / 2].a[i / 2 + k / 8 * 2][k % 2]
              * told[(2 * quarter + i % 2) * 4 + k % 8 / 2].b[k / 8][k % 2];
}

static inline void mma_integers(int (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  struct Words {
    uint8_t a[4][4];
    int8_t b[2][4];
  } mine;
  const unsigned b[2] = {b0, b1};
  memcpy(mine.a, a, sizeof a);
  memcpy(mine.b, b, sizeof b);
  const auto told = simt::told(mine);
  const int lane = simt::here->number % simt::LANES, line = lane / 4, quarter = lane % 4;
  for (int i = 0; i < 4; i++)
    for (int k = 0; k < 32; k++)
      c[i] += told[line * 4 + k % 16 / 4].a[i / 2 + k / 16 * 2][k % 4]
              * told[(2 * quarter + i % 2) * 4 + k % 16 / 4].b[k / 16][k % 4];
}

static inline void prefetch(const void*) {}
template <int COUNT> void load_once(unsigned (&to)[COUNT], const void* from) { memcpy(to, from, sizeof to); }
template <int COUNT> void sync_team(int number) {
  auto& barrier = simt::here->home->named[number];
  barrier.members = COUNT;
  simt::wait(barrier);
}
template <int COUNT> void arrive_team(int number) {
  auto& barrier = simt::here->home->named[number];
  barrier.members = COUNT;
  if (++barrier.arrived == COUNT) simt::release(barrier);
}
static inline void add_release(unsigned* counter) {
  ++*counter;
  simt::ticks = 0;
}
static inline unsigned load_acquire(const unsigned* counter) {
  simt::pause();
  return *(const volatile unsigned*)counter;
}
static inline unsigned shared_address(const void* space) {
  return (unsigned)((const char*)space - simt::shared) + simt::FIRST;
}
static inline void ask_for(unsigned to, const void* from, int bytes) {
  if (to % bytes) {
    fprintf(stderr, "a copy of %d bytes that is not aligned\n", bytes);
    _longjmp(simt::done, 3);
  }
  simt::here->asked.push_back({simt::shared + to - simt::FIRST, (const char*)from, bytes});
}
static inline void copy(unsigned to, const void* from) { ask_for(to, from, 16); }
static inline uint16_t half_at(unsigned at) { return *(const uint16_t*)(simt::shared + at - simt::FIRST); }
static inline void load_matrices(unsigned (&to)[4], unsigned from) {
  const auto rows = simt::told(from);
  const int lane = simt::here->number % simt::LANES;
  for (int i = 0; i < 4; i++) {
    const unsigned at = rows[8 * i + lane / 4] + lane % 4 * 4;
    to[i] = half_at(at) | (unsigned)half_at(at + 2) << 16;
  }
}
static inline void load_transposed(unsigned (&to)[4], unsigned from) {
  const auto rows = simt::told(from);
  const int lane = simt::here->number % simt::LANES;
  for (int i = 0; i < 4; i++) {
    const int row = 8 * i + lane % 4 * 2, column = lane / 4 * 2;
    to[i] = half_at(rows[row] + column) | (unsigned)half_at(rows[row + 1] + column) << 16;
  }
}
static inline float power2(float x) { return exp2f(x); }
template <int BYTES> void copy_bytes(unsigned to, const void* from) { ask_for(to, from, BYTES); }
static inline void commit_copies() {
  simt::here->groups.push_back(std::move(simt::here->asked));
  simt::here->asked.clear();
}
template <int COUNT> void wait_copies() {
  auto& groups = simt::here->groups;
  for (; groups.size() > COUNT; groups.erase(groups.begin()))
    for (const auto& one : groups.front()) memcpy(one.to, one.from, one.bytes);
}
static inline void fence_products() {}
static inline void begin_products() {}
static inline void commit_products() {}
template <int COUNT> void wait_products() {}
// A number of a matrix with swizzled lines of 128 bytes.
template <typename N> float number_of(unsigned long long matrix, int line, int column) {
  unsigned at = (unsigned)(matrix & 0x3fff) * 16 + line * 128 + column * 2;
  at ^= (at >> 7 & 7) << 4;
  return opened(*(const uint16_t*)(simt::shared + at - simt::FIRST), N());
}
// See matmul_tiled.group_mma.
template <typename N, int COUNT>
void products(float (&c)[COUNT], unsigned long long a, unsigned long long b) {
  const int lane = simt::here->number % 128;
  for (int i = 0; i < COUNT; i++) {
    const int row = lane / 32 * 16 + lane % 32 / 4 + i % 4 / 2 * 8;
    const int column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; k++) c[i] += number_of<N>(a, row, k) * number_of<N>(b, column, k);
  }
}
// See matmul_tiled.group_mma_columns; a has a line of 64 numbers for each of its columns.
template <typename N, int COUNT>
void products_columns(float (&c)[COUNT], unsigned long long a, unsigned long long b) {
  const int lane = simt::here->number % 128;
  for (int i = 0; i < COUNT; i++) {
    const int row = lane / 32 * 16 + lane % 32 / 4 + i % 4 / 2 * 8;
    const int column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; k++) c[i] += number_of<N>(a, k, row) * number_of<N>(b, column, k);
  }
}
// See ragged_attention.group_mma_values; b has a line of 64 numbers for each column of a, and panels of them.
template <typename N, int COUNT>
void products(float (&c)[COUNT], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned long long b) {
  struct Words {
    unsigned a[4];
  } mine = {{a0, a1, a2, a3}};
  const auto told = simt::told(mine);
  const int lane = simt::here->number % 32, line = lane / 4;
  for (int i = 0; i < COUNT; i++)
    for (int k = 0; k < 16; k++) {
      const unsigned word = told[line * 4 + k % 8 / 2].a[i % 4 / 2 + k / 8 * 2];
      const int column = i / 4 * 8 + lane % 4 * 2 + i % 2;
      const unsigned panel = column / 64 * (unsigned)(b >> 16 & 0x3fff) * 16;
      unsigned at = (unsigned)(b & 0x3fff) * 16 + panel + k * 128 + column % 64 * 2;
      at ^= (at >> 7 & 7) << 4;
      c[i] += opened(word >> 16 * (k % 2), N())
              * opened(*(const uint16_t*)(simt::shared + at - simt::FIRST), N());
    }
}
// See matmul_tiled.group_mma_by_lines; b has swizzled rows of 128 bytes, one for each column of c.
template <typename N, int COUNT>
void products_by_lines(float (&c)[COUNT], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                       unsigned long long b) {
  struct Words {
    unsigned a[4];
  } mine = {{a0, a1, a2, a3}};
  const auto told = simt::told(mine);
  const int lane = simt::here->number % 32, line = lane / 4;
  for (int i = 0; i < COUNT; i++)
    for (int k = 0; k < 16; k++) {
      const unsigned word = told[line * 4 + k % 8 / 2].a[i % 4 / 2 + k / 8 * 2];
      unsigned at = (unsigned)(b & 0x3fff) * 16 + (i / 4 * 8 + lane % 4 * 2 + i % 2) * 128 + k * 2;
      at ^= (at >> 7 & 7) << 4;
      c[i] += opened(word >> 16 * (k % 2), N())
              * opened(*(const uint16_t*)(simt::shared + at - simt::FIRST), N());
    }
}
template <int COUNT> void hold(float (&)[COUNT]) {}
static inline void hold(unsigned&) {}
// Another launch, in another thread, writes words and flags meanwhile; see simt.Ranks.
static inline void store_word(void* to, unsigned long data, unsigned long tag) {
  ((unsigned long*)to)[0] = data;
  __atomic_store_n((unsigned long*)to + 1, tag, __ATOMIC_RELEASE);
}
static inline void load_word(const void* from, unsigned long& data, unsigned long& tag) {
  tag = __atomic_load_n((const unsigned long*)from + 1, __ATOMIC_ACQUIRE);
  data = ((const unsigned long*)from)[0];
}
// The tag of a line is written behind what the other lanes have of it, and read before that.
static inline void store_line(void* to, bool tagged, unsigned long first, unsigned long second) {
  unsigned long* const words = (unsigned long*)to;
  if (!tagged) words[0] = first, words[1] = second;
  __syncwarp();
  if (!tagged) return;
  words[0] = first;
  __atomic_store_n(words + 1, second, __ATOMIC_RELEASE);
}
static inline bool load_line(const void* from, bool tagged, unsigned long tag, unsigned long (&words)[2]) {
  const auto* const line = (const unsigned long*)((uintptr_t)from & ~(uintptr_t)127);
  const unsigned long found = __atomic_load_n(line + 15, __ATOMIC_ACQUIRE);
  words[0] = ((const unsigned long*)from)[0];
  words[1] = tagged ? found : ((const unsigned long*)from)[1];
  return found == tag;
}
static inline void release_flag(unsigned long* to, unsigned long tag) {
  __atomic_store_n(to, tag, __ATOMIC_RELEASE);
}
static inline unsigned long acquired_flag(const unsigned long* from) {
  return __atomic_load_n(from, __ATOMIC_ACQUIRE);
}
static inline long nanoseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000L + now.tv_nsec;
}
__attribute__((noinline)) static void next_poll() {
  simt::waits = 0;  // this thread can continue, when another launch has written
  sched_yield();
  if (!_setjmp(simt::here->jump)) simt::go_on();
}

// ---- a launch ------------------------------------------------------------------------------------

namespace simt {

// Prepares all threads of a block, of which `number` counts the grid's.
static void prepare(Block& block, Thread* first, unsigned number, unsigned count, long bytes) {
  memset(block.shared, 0xff, bytes);
  block.index = {number % gridDim.x, number / gridDim.x % gridDim.y, number / gridDim.x / gridDim.y};
  block.warps = std::vector<Warp>((count + LANES - 1) / LANES);
  block.barrier = {(int)count, 0, 0};
  for (auto& barrier : block.named) barrier = {};
  block.votes[0] = block.votes[1] = 0;
  for (unsigned i = 0; i < count; i++) {
    Thread& thread = first[i];
    thread.index = {i, 0, 0};
    thread.home = &block;
    thread.number = i;
    thread.exchanges = thread.votes = 0;
    thread.started = thread.over = false;
    thread.asked.clear();
    thread.groups.clear();
    block.warps[i / LANES].barrier.members++;
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = stacks + (size_t)(&thread - threads.data()) * STACK;
    thread.context.uc_stack.ss_size = STACK;
    makecontext(&thread.context, thread_main, 0);
  }
}

// Runs `one` for each thread, of all blocks at the same time if they are `together`. Returns 0, or an error:
// 2, threads wait forever; 3, an unaligned copy; 4, the kernel has ended the program.
static int launch(void (*one)(), const unsigned* grid, unsigned count, long bytes, bool together) {
  entry = one;
  gridDim = {grid[0], grid[1], grid[2]};
  blockDim = {count, 1, 1};
  const unsigned all = grid[0] * grid[1] * grid[2], at_a_time = together ? all : 1;
  threads = std::vector<Thread>(at_a_time * count);
  stacks = (char*)malloc(threads.size() * STACK);
  blocks = std::vector<Block>(at_a_time);
  for (auto& block : blocks) block.shared = (char*)aligned_alloc(1024, (bytes + 2047) / 1024 * 1024);
  int why = 0;
  for (unsigned i = 0; i < all && why <= 1; i += at_a_time) {
    for (unsigned n = 0; n < at_a_time; n++)
      prepare(blocks[n], &threads[n * count], backwards ? all - 1 - i - n : i + n, count, bytes);
    waits = ticks = 0;
    alive = threads.size();
    here = &threads[backwards ? 0 : threads.size() - 1];
    why = _setjmp(done);
    if (why == 0) go_on();
  }
  free(stacks);
  for (auto& block : blocks) free(block.shared);
  backwards = !backwards;
  return why > 1 ? why : 0;
}

}  // namespace simt

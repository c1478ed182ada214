// Samples a token of each row's SIZE logits as sampler.py does, in one or a few passes of a thread
// block over its row. Masses are integers, so that the order of their sums does not matter. Candidates
// that are read often are collected in a list first; if they do not fit, the whole row is read.
// With MASKED, `masks` has a number for each row, and lines of words. The number is the row's line: its bits
// are set for the tokens that the row may draw. -1: it may draw all tokens; -2 - t: token t alone.
constexpr int CAPACITY = 4096, FINE = 128;  // FINE: buckets for each unit of a scaled logit
constexpr float MASS = 1099511627776.f;  // of the most likely token
constexpr unsigned NOTHING = 0x007fffffu;  // `ordered` of -infinity, for tokens that are never drawn
using Big = unsigned long long;
__shared__ Big space[CAPACITY], sums[32];
__shared__ unsigned listed_count;
__shared__ int bucket_found;
__shared__ Big mass_above;

const int row = blockIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
const N* const numbers = (const N*)logits + (long)row * SIZE;
// Temperature, top-p and min-p as bits of floats, top-k, and the halves of the seed.
const int* const option = (const int*)options + row * OPTIONS;
// Integers in the order of the floats, and back.
auto ordered = [](float x) -> unsigned {
  unsigned bits = __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
};
auto plain = [](unsigned key) -> float {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
};
auto total = [&](Big mine) -> Big {
  #pragma unroll
  for (int o = 16; o > 0; o >>= 1) mine += __shfl_xor_sync(0xffffffff, mine, o);
  __syncthreads();
  if (lane == 0) sums[warp] = mine;
  __syncthreads();
  Big all = 0;
  for (int w = 0; w < THREADS / 32; w++) all += sums[w];
  return all;
};
auto greatest = [&](Big mine) -> Big {
  #pragma unroll
  for (int o = 16; o > 0; o >>= 1) mine = max(mine, __shfl_xor_sync(0xffffffff, mine, o));
  __syncthreads();
  if (lane == 0) sums[warp] = mine;
  __syncthreads();
  Big all = 0;
  for (int w = 0; w < THREADS / 32; w++) all = max(all, sums[w]);
  return all;
};
// A number and its index as one key: greater numbers first, then lower indices.
auto ranked = [&](float x, int i) -> Big { return (Big)ordered(x) << 32 | (unsigned)~i; };

// Calls `work` for each number of the row and its index; a thread reads EACH neighbours at a time. Adding
// 0 removes the sign of zeros.
constexpr int EACH = SIZE % 8 ? 1 : 8;
#ifdef MASKED
constexpr int LINE = (SIZE + 31) / 32 * 4;  // bytes of the bits of a row
const unsigned char* const bits =
    masks[row] < 0 ? nullptr : (const unsigned char*)(masks + gridDim.x) + (long)masks[row] * LINE;
const bool unbound = masks[row] == -1;
const int alone = -2 - masks[row];  // the token that a row may draw alone; else negative
#endif
auto sweep = [&](auto work) {
  #pragma unroll 2
  for (int i = threadIdx.x * EACH; i < SIZE; i += THREADS * EACH) {
    const Some<N, EACH> some = *(const Some<N, EACH>*)(numbers + i);
    #ifdef MASKED
    const unsigned allowed = bits ? bits[i >> 3] >> (i & 7)
        : unbound ? ~0u : alone >= i && alone < i + EACH ? 1u << (alone - i) : 0;
    #endif
    #pragma unroll
    for (int e = 0; e < EACH; e++) {
      float x = up(some.n[e]) + 0.f;
      #ifdef MASKED
      if (!(allowed >> e & 1) && x == x) x = __uint_as_float(0xff800000u);
      #endif
      work(x, i + e);
    }
  }
};
float own_most = __uint_as_float(0xff800000u);
int own_place = SIZE;
bool broken = false;
sweep([&](float x, int i) {
  broken |= x != x;
  if (x > own_most) { own_most = x; own_place = i; }
});
const Big own = ranked(own_most, own_place);
broken = __syncthreads_or(broken);
const Big best = greatest(own);
const float top = plain(best >> 32), heat = __uint_as_float((unsigned)option[0]);
if (broken || !isfinite(top) || heat == 0) {
  if (threadIdx.x == 0) token[row] = broken || !isfinite(top) ? -1 : (int)~(unsigned)best;
  return;
}

bool listed = false;
unsigned count = 0;
uint2* const list = (uint2*)space;
auto each = [&](auto work) {
  if (listed) {
    for (int i = threadIdx.x; i < count; i += THREADS) work(list[i].x, (int)list[i].y);
  } else {
    sweep([&](float x, int i) { work(ordered(x), i); });
  }
};
// Collects the candidates that `wanted` accepts in the list, if they fit. If a mask allows fewer tokens than
// top-k, the forbidden tokens are left out: 100,000 of them would wait for each other at the counter.
auto collect = [&](auto wanted) {
  __syncthreads();
  if (threadIdx.x == 0) listed_count = 0;
  __syncthreads();
  sweep([&](float x, int i) {
    const unsigned key = ordered(x);
    if (key > NOTHING && wanted(key)) {
      unsigned at = atomicAdd(&listed_count, 1u);
      if (at < CAPACITY) list[at] = make_uint2(key, i);
    }
  });
  __syncthreads();
  count = listed_count;
  listed = count <= CAPACITY;
};
auto scaled = [&](unsigned key) -> float { return (plain(key) - top) / heat; };
auto mass = [&](unsigned key) -> Big { return (Big)(expf(scaled(key)) * MASS); };

unsigned least = 0;  // the least key that is kept
const int k = option[3];
if (k > 0) {
  // k threads have a number not below `least`, so the row has at least k such numbers.
  const unsigned seen = own >> 32;
  for (unsigned bit = 1u << 31; bit > 0; bit >>= 1)
    if (__syncthreads_count(seen >= (least | bit)) >= k) least |= bit;
  const unsigned bound = least;
  collect([&](unsigned key) { return key >= bound; });
  least = 0;
  for (unsigned bit = 1u << 31; bit > 0; bit >>= 1) {
    Big found = 0;
    each([&](unsigned key, int) { found += key >= (least | bit); });
    if (total(found) >= k) least |= bit;
  }
}
const float p = __uint_as_float((unsigned)option[1]);
if (p < 1) {
  Big found = 0, above = 0;
  const unsigned bound = least;
  const bool whole = !listed;
  if (whole)
    for (int i = threadIdx.x; i < CAPACITY; i += THREADS) space[i] = 0;
  __syncthreads();
  auto bucket = [&](unsigned key) -> int { return min((int)(-scaled(key) * FINE), CAPACITY - 1); };
  each([&](unsigned key, int) {
    if (key < bound) return;
    Big one = mass(key);
    found += one;
    if (whole && one > 0) atomicAdd(&space[bucket(key)], one);
  });
  const double enough = (double)p * (double)total(found);
  if (whole) {
    // The bucket in which the mass is reached, and the mass above it.
    constexpr int OWN = CAPACITY / THREADS;
    Big mine = 0;
    for (int i = 0; i < OWN; i++) mine += space[threadIdx.x * OWN + i];
    Big upto = mine;
    #pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
      Big other = __shfl_up_sync(0xffffffff, upto, o);
      if (lane >= o) upto += other;
    }
    __syncthreads();
    if (lane == 31) sums[warp] = upto;
    if (threadIdx.x == 0) bucket_found = CAPACITY - 1, mass_above = 0;
    __syncthreads();
    Big before = upto - mine;
    for (int w = 0; w < warp; w++) before += sums[w];
    if ((double)before < enough && (double)(before + mine) >= enough) {
      int i = threadIdx.x * OWN;
      while ((double)(before + space[i]) < enough) before += space[i++];
      bucket_found = i;
      mass_above = before;
    }
    __syncthreads();
    above = mass_above;
    const int wanted = bucket_found;
    collect([&](unsigned key) { return key >= bound && bucket(key) == wanted; });
    if (!listed) above = 0;
  }
  // Invariant: the mass above `high` is less than `enough`, the mass above `low` is not.
  unsigned low = 0, high = best >> 32;
  while (high - low > 1) {
    const unsigned middle = low + (high - low) / 2;
    Big over = 0;
    each([&](unsigned key, int) { if (key > middle && key >= bound) over += mass(key); });
    if ((double)(above + total(over)) < enough) high = middle; else low = middle;
  }
  least = max(bound, high);
  if (whole) listed = false;
}
const float min_p = __uint_as_float((unsigned)option[2]);
// The key of the noise is SplitMix64 of the position in the stream of the seed.
Big z = ((Big)(unsigned)option[4] << 32 | (unsigned)option[5])
        + 0x9E3779B97F4A7C15ull * (Big)(positions[row] + 1);
z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
z ^= z >> 31;
const unsigned first_key = z >> 32, second_key = (unsigned)z;
// The noise of MLX's gumbel at index i of SIZE: Threefry in 20 rounds, for two indices at a time.
auto noise = [&](int i) -> float {
  constexpr int FRONT = SIZE / 2 + SIZE % 2;
  const bool back = i >= FRONT;
  const unsigned keys[3] = {first_key, second_key, first_key ^ second_key ^ 0x1BD11BDAu};
  unsigned a = back ? i - FRONT : i;
  unsigned b = SIZE % 2 && a == SIZE / 2 ? 0 : a + FRONT;
  a += keys[0];
  b += keys[1];
  constexpr int turns[8] = {13, 15, 26, 6, 17, 29, 16, 24};
  #pragma unroll
  for (int n = 0; n < 5; n++) {
    #pragma unroll
    for (int m = 0; m < 4; m++) {
      a += b;
      b = __funnelshift_l(b, b, turns[n % 2 * 4 + m]) ^ a;
    }
    a += keys[(n + 1) % 3];
    b += keys[(n + 2) % 3] + n + 1;
  }
  const float one = fminf((float)(back ? b : a) / 4294967296.f, 0x1.fffffep-1f);
  return -logf(-logf(one));
};
Big drawn = 0;
const unsigned bound = least;
each([&](unsigned key, int i) {
  const float x = scaled(key);
  if (key >= bound && expf(x) >= min_p) drawn = max(drawn, ranked(x + noise(i), i));
});
drawn = greatest(drawn);
if (threadIdx.x == 0) token[row] = (int)~(unsigned)drawn;

// Products of one token with the rows of weights, in kernels whose thread blocks wait for each other (grid_barrier.cuh).
// A warp computes rows `own`, `own` + ALL and so on of a weight; it loads the first of these rows into registers before
// the barrier that its other factor waits for. A load of a lane has 16 bytes.
constexpr int TOKEN_WARPS = 16, TOKEN_THREADS = 32 * TOKEN_WARPS;
constexpr int MOST_LOADS = 16;  // loads that a lane begins before a barrier
__device__ inline float whole_sum(float sum) {
  #pragma unroll
  for (int by = 1; by < 32; by *= 2) sum += __shfl_xor_sync(0xffffffff, sum, by);
  return sum;
}
// This lane's load number `at` of a row of LENGTH numbers; zeros after the end of the row.
template <typename N, int LENGTH> __device__ inline uint4 load_of(const N* row, int at) {
  const int number = (at * 32 + threadIdx.x % 32) * 8;
  return number < LENGTH ? *(const uint4*)(row + number) : uint4{0, 0, 0, 0};
}
// The sum of the products of load number `at` with the numbers at its place.
template <typename N, int LENGTH> __device__ inline float product_of(uint4 load, const uint4* with, int at) {
  const int piece = at * 32 + threadIdx.x % 32;
  if (piece * 8 >= LENGTH) return 0.f;
  const Some<N, 8> left = *(const Some<N, 8>*)&load, right = *(const Some<N, 8>*)(with + piece);
  float sum = 0;
  #pragma unroll
  for (int i = 0; i < 8; i++) sum = fmaf(up(left.n[i]), up(right.n[i]), sum);
  return sum;
}
// The rows of a warp in a weight of COUNT rows of LENGTH numbers.
template <typename N, int LENGTH, int COUNT, int ALL> struct TokenRows {
  static constexpr int LOADS = (LENGTH + 255) / 256, TURNS = (LOADS + 9) / 10;
  static constexpr int HELD = (LOADS + TURNS - 1) / TURNS;  // loads of a row that begin at a time
  static constexpr int EACH = (COUNT + ALL - 1) / ALL, FIT = MOST_LOADS / HELD;
  static constexpr int AHEAD = EACH < FIT ? EACH : FIT;  // rows whose loads begin at a time
  uint4 some[AHEAD][HELD];
  // Begins to load AHEAD rows of the warp from its `first` on. `row_of` gives the address of a row.
  template <typename Row> __device__ inline void ask(int own, int first, Row row_of) {
    #pragma unroll
    for (int n = 0; n < AHEAD; n++) {
      const int row = own + (first + n) * ALL;
      if (row < COUNT)
        #pragma unroll
        for (int i = 0; i < HELD; i++) some[n][i] = load_of<N, LENGTH>(row_of(row), i);
    }
  }
  // Multiplies each row of the warp with the vector `with_of(row)`, and calls `put(row, sum)`. `ask(own, 0, row_of)` has
  // loaded the first rows.
  template <typename Row, typename With, typename Put>
  __device__ inline void multiply(int own, Row row_of, With with_of, Put put) {
    #pragma unroll 1
    for (int first = 0; first < EACH; first += AHEAD) {
      if (first > 0) ask(own, first, row_of);
      #pragma unroll
      for (int n = 0; n < AHEAD; n++) {
        const int row = own + (first + n) * ALL;
        if (row >= COUNT) continue;
        float sum = 0;
        #pragma unroll
        for (int i = 0; i < HELD; i++) sum += product_of<N, LENGTH>(some[n][i], with_of(row), i);
        #pragma unroll 1
        for (int from = HELD; from < LOADS; from += HELD) {
          #pragma unroll
          for (int i = 0; i < HELD; i++)
            if (from + i < LOADS) some[n][i] = load_of<N, LENGTH>(row_of(row), from + i);
          #pragma unroll
          for (int i = 0; i < HELD; i++)
            if (from + i < LOADS) sum += product_of<N, LENGTH>(some[n][i], with_of(row), from + i);
        }
        put(row, whole_sum(sum));
      }
    }
  }
};
// The norm of `x` [SIZE] with `gain`, written to `line`; x may be in memory that this launch writes. Uses `sums`
// [TOKEN_WARPS] and waits for all threads of the block. Rounded as by the separate kernels.
template <typename N, int SIZE> __device__ inline void norm_token(const N* x, const N* gain, float eps, uint4* line, float* sums) {
  constexpr int COUNT = (SIZE / 8 + TOKEN_THREADS - 1) / TOKEN_THREADS;
  using Eight = Some<N, 8>;
  const int thread = threadIdx.x;
  Eight raw[COUNT];
  float squares = 0;
  #pragma unroll
  for (int n = 0; n < COUNT; n++) {
    const int piece = n * TOKEN_THREADS + thread;
    if (piece * 8 >= SIZE) continue;
    *(uint4*)&raw[n] = __ldcg((const uint4*)x + piece);
    #pragma unroll
    for (int i = 0; i < 8; i++) squares += up(raw[n].n[i]) * up(raw[n].n[i]);
  }
  squares = whole_sum(squares);
  if (thread % 32 == 0) sums[thread / 32] = squares;
  __syncthreads();
  squares = 0;
  #pragma unroll
  for (int w = 0; w < TOKEN_WARPS; w++) squares += sums[w];
  const float factor = rsqrtf(squares / SIZE + eps);
  #pragma unroll
  for (int n = 0; n < COUNT; n++) {
    const int piece = n * TOKEN_THREADS + thread;
    if (piece * 8 >= SIZE) continue;
    const Eight by = ((const Eight*)gain)[piece];
    Eight result;
    #pragma unroll
    for (int i = 0; i < 8; i++) {
      N rounded;
      down(up(raw[n].n[i]) * factor, &rounded);
      down(up(rounded) * up(by.n[i]), &result.n[i]);
    }
    *(Eight*)(line + piece) = result;
  }
  __syncthreads();
}
// Waits for all thread blocks; if it gives up, fills `out` with NaN and returns false.
template <bool GIVES_UP, typename N> __device__ inline bool wait_for_all(GridBarrier& barrier, N* out, int count) {
  if (barrier.wait<GIVES_UP>()) return true;
  for (int i = threadIdx.x; i < count; i += TOKEN_THREADS) down(__uint_as_float(0x7fffffff), out + i);
  return false;
}
// Copies `count` numbers that other thread blocks have written to `line`, and waits for all threads of the block.
template <typename N> __device__ inline void read_token(const N* from, int count, uint4* line) {
  for (int i = threadIdx.x; i < count / 8; i += TOKEN_THREADS) line[i] = __ldcg((const uint4*)from + i);
  __syncthreads();
}

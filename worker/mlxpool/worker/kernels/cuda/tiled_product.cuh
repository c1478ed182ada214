// A tile of matmul_tiled.cu and of decode_pass.cu: 128 rows of a weight [_, IN] times up to 8 * SETS lines
// [LINES, IN], in the tensor cores of Hopper. Both operands come through shared memory, 64 columns at a
// time and STAGES - 2 steps ahead, in the layout of the tensor cores: 128 bytes a row, whose 16-byte pieces
// are swizzled differently in each of eight rows. Each of two groups of four warps multiplies 64 rows by
// all lines while the next columns are copied, by all THREADS of the block. The file follows group_mma, see
// matmul_tiled.py.
constexpr int TILE_ROWS = 128;
constexpr int stage_bytes(int sets) { return (TILE_ROWS + 8 * sets) * 128; }
// Multiplies the columns [64 * begin, 64 * end). Rows from `half` of the tile on are `apart` rows further
// behind than their neighbours: the other half of a gated weight. `base`: the address of STAGES stages of
// shared memory, a multiple of 1,024. Thread t < 256 gets the sums of rows `tile_row(t, i)` and lines
// `tile_line(t, i)`. No copies are left in flight.
template <int SETS, int STAGES, int THREADS, typename N>
__device__ inline void tiled_product(float (&sum)[4 * SETS], const N* x, int lines, int in, const N* weight,
                                     int half, long apart, int begin, int end, unsigned base) {
  constexpr int ALL = 8 * SETS, STAGE = stage_bytes(SETS), COPIES = (TILE_ROWS + ALL) * 8;
  auto fetch = [&](int step) {
    if (step < end) {
      const unsigned to = base + (step - begin) % STAGES * STAGE;
      #pragma unroll
      for (int n = 0; n < (COPIES + THREADS - 1) / THREADS; n++) {
        const int i = n * THREADS + threadIdx.x, row = i / 8, piece = i % 8;
        const N* from = x + (long)min(row - TILE_ROWS, lines - 1) * in;
        if (row < TILE_ROWS) from = weight + (row + (row < half ? 0 : apart)) * in;
        if (row < TILE_ROWS + ALL)
          copy(to + row * 128 + (piece ^ row % 8) * 16, from + step * 64 + piece * 8);
      }
    }
    commit_copies();
  };
  // The descriptor of a matrix: swizzled rows of 128 bytes, eight rows in 1,024 bytes.
  auto matrix = [](unsigned at) -> unsigned long long {
    return (unsigned long long)((at & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
  };
  #pragma unroll
  for (int i = 0; i < 4 * SETS; i++) sum[i] = 0;
  #pragma unroll
  for (int ahead = 0; ahead < STAGES - 2; ahead++) fetch(begin + ahead);
  const int group = threadIdx.x / 128;
  for (int step = begin; step < end; step++) {
    wait_copies<STAGES - 3>();
    fence_products();
    __syncthreads();  // all threads have multiplied what the next columns overwrite
    fetch(step + STAGES - 2);
    if (THREADS == 256 || group < 2) {
      const unsigned here = base + (step - begin) % STAGES * STAGE;
      begin_products();
      const unsigned long long rows = matrix(here + group * 64 * 128);
      const unsigned long long columns = matrix(here + TILE_ROWS * 128);
      #pragma unroll
      for (int k = 0; k < 4; k++) group_mma(sum, rows + 2 * k, columns + 2 * k);
      commit_products();
      wait_products<1>();
    }
  }
  wait_products<0>();
  wait_copies<0>();
}
__device__ inline int tile_row(int thread, int i) {
  return thread / 32 * 16 + thread % 32 / 4 + i % 4 / 2 * 8;
}
__device__ inline int tile_line(int thread, int i) { return i / 4 * 8 + thread % 4 * 2 + i % 2; }

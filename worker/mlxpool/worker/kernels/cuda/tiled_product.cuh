// A tile of matmul_tiled.cu and of decode_pass.cu: TILE_ROWS rows of a weight [_, IN] times up to 8 * SETS lines
// [LINES, IN], in the tensor cores of Hopper. Both operands come through shared memory, 64 columns at a
// time and STAGES - 2 steps ahead, in the layout of the tensor cores: 128 bytes a row, whose 16-byte pieces
// are swizzled differently in each of eight rows. Each group of four warps multiplies 64 rows by
// all lines while the next columns are copied, by all THREADS of the block. The file follows group_mma, see
// matmul_tiled.py.
#ifndef ROWS_OF_TILE
#define ROWS_OF_TILE 128
#endif
constexpr int TILE_ROWS = ROWS_OF_TILE;  // 64 or 128
constexpr int stage_bytes(int sets) { return (TILE_ROWS + 8 * sets) * 128; }
// The columns [64 * begin, 64 * end) of TILE_ROWS rows of a weight. Rows from `half` on, the other half of a gated
// weight, are moved by `apart` rows. The lines that are multiplied with it begin `line` numbers apart; 0: `in`.
template <typename N> struct WeightTile {
  const N* rows;
  int in, half;
  long apart;
  int begin, end, line = 0;
};
// Copies rows [FROM, TO) of both operands of a step, the weight's rows first, to their stage.
template <int FROM, int TO, int SETS, int STAGES, int THREADS, typename N>
__device__ inline void copy_step(const WeightTile<N>& tile, const N* x, int lines, int step, unsigned base) {
  constexpr int COPIES = (TO - FROM) * 8;  // pieces of 16 bytes
  if (step >= tile.end) return;
  const unsigned to = base + (step - tile.begin) % STAGES * stage_bytes(SETS);
  #pragma unroll
  for (int n = 0; n < (COPIES + THREADS - 1) / THREADS; n++) {
    const int i = n * THREADS + threadIdx.x, row = FROM + i / 8, piece = i % 8;
    const N* from = x + (long)min(row - TILE_ROWS, lines - 1) * (tile.line ? tile.line : tile.in);
    if (row < TILE_ROWS) from = tile.rows + (row + (row < tile.half ? 0 : tile.apart)) * tile.in;
    if (i < COPIES) copy(to + row * 128 + (piece ^ row % 8) * 16, from + step * 64 + piece * 8);
  }
}
// Begins a product before its lines are there: copies the weight's part of its steps [from, to), at most
// STAGES - 2.
template <int SETS, int STAGES, int THREADS, typename N>
__device__ inline void begin_product(const WeightTile<N>& tile, int from, int to, unsigned base) {
  #pragma unroll 1
  for (int step = tile.begin + from; step < tile.begin + to; step++)
    copy_step<0, TILE_ROWS, SETS, STAGES, THREADS>(tile, tile.rows, 1, step, base);
  commit_copies();
}
// Multiplies a tile with `lines` lines x. `base`: the address of STAGES stages of shared memory, a multiple of
// 1,024, which all threads may overwrite. Thread t < 2 * TILE_ROWS gets the sums of rows `tile_row(t, i)` and lines
// `tile_line(t, i)`. No copies are left in flight. `begun`: the first steps that `begin_product` has copied.
template <int SETS, int STAGES, int THREADS, typename N>
__device__ inline void tiled_product(float (&sum)[4 * SETS], const WeightTile<N>& tile, const N* x, int lines,
                                     unsigned base, int begun) {
  constexpr int ALL = TILE_ROWS + 8 * SETS;
  #pragma unroll
  for (int i = 0; i < 4 * SETS; i++) sum[i] = 0;
  #pragma unroll 1
  for (int ahead = 0; ahead < STAGES - 2; ahead++) {
    const int step = tile.begin + ahead;
    if (ahead >= begun) copy_step<0, TILE_ROWS, SETS, STAGES, THREADS>(tile, x, lines, step, base);
    copy_step<TILE_ROWS, ALL, SETS, STAGES, THREADS>(tile, x, lines, step, base);
    commit_copies();
  }
  const int group = threadIdx.x / 128;
  for (int step = tile.begin; step < tile.end; step++) {
    wait_copies<STAGES - 3>();
    fence_products();
    __syncthreads();  // all threads have multiplied the columns that the next ones overwrite
    copy_step<0, ALL, SETS, STAGES, THREADS>(tile, x, lines, step + STAGES - 2, base);
    commit_copies();
    if (THREADS == 2 * TILE_ROWS || group < TILE_ROWS / 64) {
      const unsigned here = base + (step - tile.begin) % STAGES * stage_bytes(SETS);
      begin_products();
      const unsigned long long rows = matrix_at(here + group * 64 * 128);
      const unsigned long long columns = matrix_at(here + TILE_ROWS * 128);
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

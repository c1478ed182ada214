// A product of each head of a step's lines with the head's own weight, in the tensor cores of Hopper:
// out [LINES, HEADS, OUT_HEAD] = x [LINES, HEADS, X_HEAD] weight [HEADS, OUT, IN]^T, of the first IN numbers of
// x's heads to the first OUT of the result's. A thread block has TILE_ROWS rows of the weight of a head and
// up to 8 * SETS lines (tiled_product.cuh). TURNED: the numbers after those are rotated, by further thread blocks.
constexpr int ROWS = TILE_ROWS, ALL = 8 * SETS, THREADS = 2 * ROWS, TILES = OUT / ROWS;
const int first_line = blockIdx.y * ALL, lines = min(ALL, x_shape[0] - first_line), thread = threadIdx.x;
const N* const from = (const N*)x + (long)first_line * HEADS * X_HEAD;
N* const to = (N*)out + (long)first_line * HEADS * OUT_HEAD;
if (TURNED > 0 && blockIdx.x >= HEADS * TILES) {
  const int head = blockIdx.x - HEADS * TILES;
  for (int i = thread; i < lines * (TURNED / 2); i += THREADS) {
    const int line = i / (TURNED / 2), d = i % (TURNED / 2) * 2;
    const long turns = (long)(first_line + line) * (TURNED / 2);
    const N* const numbers = from + ((long)line * HEADS + head) * X_HEAD + IN;
    auto turned = [&](int d) -> float {
      return rotated<N, TURNED, TRADITIONAL>(numbers, 1, d, (const float*)cosines + turns, (const float*)sines + turns);
    };
    *(unsigned*)(to + ((long)line * HEADS + head) * OUT_HEAD + OUT + d) = pair(turned(d), turned(d + 1), N());
  }
  return;
}
const int head = blockIdx.x / TILES, first = blockIdx.x % TILES * ROWS;
extern __shared__ uint4 space[];
float sum[4 * SETS];
const WeightTile<N> tile = {(const N*)weight + ((long)head * OUT + first) * IN, IN, ROWS, 0, 0, IN / 64,
                            HEADS * X_HEAD};
tiled_product<SETS, STAGES, THREADS>(sum, tile, from + head * X_HEAD, lines,
                                     (shared_address(space) + 1023) & ~1023u, 0);
__syncthreads();
float* const found = (float*)space;  // [ALL][ROWS + 1]
#pragma unroll
for (int i = 0; i < 4 * SETS; i++) found[tile_line(thread, i) * (ROWS + 1) + tile_row(thread, i)] = sum[i];
__syncthreads();
for (int i = thread; i < lines * (ROWS / 2); i += THREADS) {
  const int line = i / (ROWS / 2), row = i % (ROWS / 2) * 2;
  const float* const two = found + line * (ROWS + 1) + row;
  *(unsigned*)(to + ((long)line * HEADS + head) * OUT_HEAD + first + row) = pair(two[0], two[1], N());
}

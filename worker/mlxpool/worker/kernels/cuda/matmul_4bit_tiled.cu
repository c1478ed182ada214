// Products of many tokens ("lines") with an affine 4-bit weight in tiles (tiles_4bit.cuh), out [LINES, OUT] =
// x [LINES, IN] W [OUT, IN]^T, in the tensor cores of Hopper. A thread block has ROWS rows of the weight, half
// of them gates where products are gated, 8 * SETS lines, and the columns of one of gridDim.y parts. Blocks
// with the same rows are neighbours, so the weight is read from memory once. Lines come through shared memory
// as in tiled_product.cuh, and so do tiles, 64 columns at a time and STAGES - 2 steps ahead. Each of two groups
// of four warps dequantises TILES tiles into registers, which are the first operand of its products: the next
// 16 columns while up to three products before them run. The part that finishes last adds up all parts.
constexpr int THREADS = 256, ROWS = 128 * TILES, ALL = 8 * SETS, TILE = 4 * FRAGMENT;
constexpr int EACH = GATED ? ROWS / 2 : ROWS;  // results of a thread block for a line
constexpr int LINE_COPIES = (ALL * 8 + THREADS - 1) / THREADS, PIECES = TILE / 16;
constexpr int TILE_COPIES = (2 * TILES * PIECES + THREADS - 1) / THREADS;  // of a thread, of 16 bytes
const int IN = x_shape[1], STEPS = IN / 64, OUT = weight_shape[0] * 64 / (GATED ? 2 : 1);
const int sections = (x_shape[0] + ALL - 1) / ALL, section = blockIdx.x % sections;
const int LINES = min(ALL, x_shape[0] - section * ALL), first = blockIdx.x / sections * EACH;
const int part = blockIdx.y, parts = gridDim.y;
const int begin = (int)((long)STEPS * part / parts), end = (int)((long)STEPS * (part + 1) / parts);
const N* const lines = (const N*)x + (long)section * ALL * IN;
extern __shared__ uint4 space[];  // [STAGES] lines, [STAGES] tiles, or sums
const unsigned address = shared_address(space), base = (address + 1023) & ~1023u;
constexpr int TILES_AT = STAGES * ALL * 128;
// Where this thread copies from, in the first step.
const char* tile_from[TILE_COPIES];
const N* line_from[LINE_COPIES];
#pragma unroll
for (int n = 0; n < TILE_COPIES; n++) {
  const int i = n * THREADS + threadIdx.x, tile = i / PIECES;
  int row = first / 64 + tile;
  if (GATED && tile >= TILES) row += (OUT - EACH) / 64;
  row = min(row, weight_shape[0] - 1);  // the last block may have fewer tiles
  tile_from[n] = (const char*)weight + fragment_offset(row * 4, begin, STEPS) + i % PIECES * 16;
}
#pragma unroll
for (int n = 0; n < LINE_COPIES; n++) {
  const int i = n * THREADS + threadIdx.x;
  line_from[n] = lines + (long)min(i / 8, LINES - 1) * IN + begin * 64 + i % 8 * 8;
}
// Copies the columns of the next step, of which there are `left`.
int left = end - begin;
unsigned tiles_to = base + TILES_AT + threadIdx.x * 16;
unsigned lines_to = base + threadIdx.x / 8 * 128 + (threadIdx.x % 8 ^ threadIdx.x / 8 % 8) * 16;
int ahead = 0;  // its stage
auto fetch = [&] {
  if (left > 0) {
    #pragma unroll
    for (int n = 0; n < TILE_COPIES; n++) {
      if (n * THREADS + threadIdx.x < 2 * TILES * PIECES) copy(tiles_to + n * THREADS * 16, tile_from[n]);
      tile_from[n] += TILE;
    }
    #pragma unroll
    for (int n = 0; n < LINE_COPIES; n++) {
      if (n * THREADS + threadIdx.x < ALL * 8) copy(lines_to + n * THREADS / 8 * 128, line_from[n]);
      line_from[n] += 64;
    }
    left--;
    const bool last = ahead == STAGES - 1;
    ahead = last ? 0 : ahead + 1;
    tiles_to += 2 * TILES * TILE - (last ? STAGES * 2 * TILES * TILE : 0);
    lines_to += ALL * 128 - (last ? STAGES * ALL * 128 : 0);
  }
  commit_copies();
};
float sum[TILES][4 * SETS];
#pragma unroll
for (int tile = 0; tile < TILES; tile++)
  #pragma unroll
  for (int i = 0; i < 4 * SETS; i++) sum[tile][i] = 0;
#pragma unroll
for (int tile = 0; tile < TILES; tile++) hold(sum[tile]);
#pragma unroll 1
for (int n = 0; n < STAGES - 2; n++) fetch();
const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
// The fragments of this thread's warp in the first tile of its group, in the first stage.
const char* const fragments
    = (const char*)space + (base - address) + TILES_AT + warp / 4 * TILES * TILE + warp % 4 * FRAGMENT;
const unsigned held = held_pair<N>(x_shape[0]);
int stage = 0;
#pragma unroll 1
for (int n = 0; n < end - begin; n++) {
  wait_copies<STAGES - 3>();
  fence_products();
  __syncthreads();  // all threads have multiplied what the next columns overwrite
  fetch();
  const unsigned at = base + stage * ALL * 128;
  // The descriptor of a matrix: swizzled rows of 128 bytes, eight rows in 1,024 bytes.
  const unsigned long long columns
      = (unsigned long long)((at & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
  unsigned words[TILES][4];
  Some<N, 4> factors[TILES][GROUPS];
  #pragma unroll
  for (int tile = 0; tile < TILES; tile++) {
    const char* const here = fragments + (stage * 2 * TILES + tile) * TILE;
    *(uint4*)words[tile] = ((const uint4*)here)[lane];
    #pragma unroll
    for (int group = 0; group < GROUPS; group++)
      factors[tile][group] = *(const Some<N, 4>*)(here + 512 + (lane / 4 * GROUPS + group) * 8);
  }
  #pragma unroll
  for (int j = 0; j < 4; j++) {
    unsigned a[TILES][4];
    wait_products<3>();  // those that read the registers of `a`
    #pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
      hold(words[tile][j]);
      const Some<N, 4> some = factors[tile][j * 16 / GROUP];
      #pragma unroll
      for (int p = 0; p < 4; p++)
        a[tile][p] = lowered(raised(words[tile][j], p, held), some.n[p % 2], some.n[2 + p % 2]);
    }
    begin_products();
    #pragma unroll
    for (int tile = 0; tile < TILES; tile++)
      group_mma_by_lines(sum[tile], a[tile][0], a[tile][1], a[tile][2], a[tile][3], columns + 2 * j);
    commit_products();
  }
  stage = stage == STAGES - 1 ? 0 : stage + 1;
}
wait_products<0>();
#pragma unroll
for (int tile = 0; tile < TILES; tile++) hold(sum[tile]);
wait_copies<0>();
if (TILES == 1 && parts > 1) {
  __shared__ int before;
  float4* const all = (float4*)partial + (long)blockIdx.x * parts * TILES * SETS * THREADS + threadIdx.x;
  #pragma unroll
  for (int i = 0; i < TILES * SETS; i++)
    all[(part * TILES * SETS + i) * THREADS] = *(float4*)&sum[i / SETS][i % SETS * 4];
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) before = atomicAdd((int*)arrived + blockIdx.x, 1);
  __syncthreads();
  if (before < parts - 1) return;
  __threadfence();
  if (threadIdx.x == 0) ((int*)arrived)[blockIdx.x] = 0;
  #pragma unroll
  for (int tile = 0; tile < TILES; tile++)
    #pragma unroll
    for (int i = 0; i < 4 * SETS; i++) sum[tile][i] = 0;
  #pragma unroll 1
  for (int p = 0; p < parts; p++)
    #pragma unroll
    for (int i = 0; i < TILES * SETS; i++) {
      const float4 some = __ldcg(all + (p * TILES * SETS + i) * THREADS);
      float* const four = &sum[i / SETS][i % SETS * 4];
      four[0] += some.x;
      four[1] += some.y;
      four[2] += some.z;
      four[3] += some.w;
    }
}
__syncthreads();
float* const found = (float*)space;  // [ALL][ROWS + 1]
#pragma unroll
for (int tile = 0; tile < TILES; tile++)
  #pragma unroll
  for (int i = 0; i < 4 * SETS; i++)
    found[(i / 4 * 8 + lane % 4 * 2 + i % 2) * (ROWS + 1)
          + (warp / 4 * TILES + tile) * 64 + warp % 4 * 16 + lane / 4 + i % 4 / 2 * 8] = sum[tile][i];
__syncthreads();
for (int i = threadIdx.x; i < LINES * EACH; i += THREADS) {
  const int row = i % EACH, l = i / EACH;
  const float* const sums = found + l * (ROWS + 1);
  if (first + row < OUT)
    down(GATED ? gated(sums[row], sums[EACH + row], N()) : sums[row],
         (N*)out + (long)(section * ALL + l) * OUT + first + row);
}

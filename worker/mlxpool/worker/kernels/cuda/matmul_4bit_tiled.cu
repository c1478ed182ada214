// Products of many tokens ("lines") with an affine 4-bit weight in tiles (tiles_4bit.cuh), out [LINES, OUT] =
// x [LINES, IN] W [OUT, IN]^T, in the tensor cores of Hopper. A thread block has ROWS rows of the weight, half
// of them gates if products are gated, 8 * SETS lines, and the columns of one of gridDim.y parts. Blocks
// with the same rows are neighbours, so the weight is read from memory once. Lines come through shared memory
// as in tiled_product.cuh, and so do tiles, 64 columns at a time and STAGES - 2 * DEEP steps ahead. There are
// HIGH * DEEP warpgroups: HIGH of them have a tile of a step each, and DEEP times as many take steps in turns. A
// warpgroup dequantises its tile into registers, which are the first operand of its products: the next 16 columns
// while up to three products before them run. The part that finishes last adds up all parts.
constexpr int THREADS = 128 * HIGH * DEEP;
constexpr int ROWS = 64 * HIGH, ALL = 8 * SETS, TILE = 4 * FRAGMENT;
constexpr int EACH = GATED ? ROWS / 2 : ROWS;  // results of a thread block for a line
constexpr int LINE_COPIES = (ALL * 8 + THREADS - 1) / THREADS, PIECES = TILE / 16;
constexpr int TILE_COPIES = (HIGH * PIECES + THREADS - 1) / THREADS;  // of a thread, of 16 bytes
constexpr int WHOLE = ROWS + 4;  // numbers of a line of sums: four lines are in different banks
const int IN = x_shape[1], STEPS = IN / 64, OUT = weight_shape[0] * 64 / (GATED ? 2 : 1);
const int sections = (x_shape[0] + ALL - 1) / ALL, section = blockIdx.x % sections;
const int LINES = min(ALL, x_shape[0] - section * ALL), first = blockIdx.x / sections * EACH;
const int part = blockIdx.y, parts = gridDim.y;
const int TURNS = STEPS / DEEP;
const int begin = (int)((long)TURNS * part / parts) * DEEP, end = (int)((long)TURNS * (part + 1) / parts) * DEEP;
const N* const lines = (const N*)x + (long)section * ALL * IN;
extern __shared__ uint4 space[];  // [STAGES] lines, [STAGES] tiles, or sums
const unsigned address = shared_address(space), base = (address + 1023) & ~1023u;
constexpr int TILES_AT = STAGES * ALL * 128;
// The sources of this thread's copies, in the first step.
const char* tile_from[TILE_COPIES];
const N* line_from[LINE_COPIES];
#pragma unroll
for (int n = 0; n < TILE_COPIES; n++) {
  const int i = n * THREADS + threadIdx.x, tile = i / PIECES;
  int row = first / 64 + tile;
  if (GATED && tile >= HIGH / 2) row += (OUT - EACH) / 64;
  row = min(row, weight_shape[0] - 1);  // the last block may have fewer tiles
  tile_from[n] = (const char*)weight + fragment_offset(row * 4, begin, STEPS) + i % PIECES * 16;
}
#pragma unroll
for (int n = 0; n < LINE_COPIES; n++) {
  const int i = n * THREADS + threadIdx.x;
  line_from[n] = lines + (long)min(i / 8, LINES - 1) * IN + begin * 64 + i % 8 * 8;
}
// Copies the columns of the next step; `left` steps remain.
int left = end - begin;
unsigned tiles_to = base + TILES_AT + threadIdx.x * 16;
unsigned lines_to = base + threadIdx.x / 8 * 128 + (threadIdx.x % 8 ^ threadIdx.x / 8 % 8) * 16;
int ahead = 0;  // its stage
auto fetch = [&] {
  if (left > 0) {
    #pragma unroll
    for (int n = 0; n < TILE_COPIES; n++) {
      if (n * THREADS + threadIdx.x < HIGH * PIECES) copy(tiles_to + n * THREADS * 16, tile_from[n]);
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
    tiles_to += HIGH * TILE - (last ? STAGES * HIGH * TILE : 0);
    lines_to += ALL * 128 - (last ? STAGES * ALL * 128 : 0);
  }
  commit_copies();
};
float sum[4 * SETS];
#pragma unroll
for (int i = 0; i < 4 * SETS; i++) sum[i] = 0;
hold(sum);
#pragma unroll 1
for (int n = 0; n < STAGES - 2 * DEEP; n++) fetch();
const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % (4 * HIGH), turn = threadIdx.x / (128 * HIGH);
// The fragment of this thread's warp in the first stage.
const char* const fragments
    = (const char*)space + (base - address) + TILES_AT + warp / 4 * TILE + warp % 4 * FRAGMENT;
const unsigned held = held_pair<N>(x_shape[0]);
int stage = turn;
#pragma unroll 1
for (int n = begin; n < end; n += DEEP) {
  wait_copies<STAGES - 3 * DEEP>();
  fence_products();
  __syncthreads();  // all threads have multiplied the columns that the next ones overwrite
  #pragma unroll
  for (int i = 0; i < DEEP; i++) fetch();
  const unsigned at = base + stage * ALL * 128;
  const unsigned long long columns = matrix_at(at);
  const char* const here = fragments + stage * HIGH * TILE;
  unsigned words[4];
  *(uint4*)words = ((const uint4*)here)[lane];
  Some<N, 4> factors[GROUPS];
  #pragma unroll
  for (int group = 0; group < GROUPS; group++)
    factors[group] = *(const Some<N, 4>*)(here + 512 + (lane / 4 * GROUPS + group) * 8);
  #pragma unroll
  for (int j = 0; j < 4; j++) {
    unsigned a[4];
    wait_products<3>();  // the products that read the registers of `a`
    hold(words[j]);
    const Some<N, 4> some = factors[j * 16 / GROUP];
    #pragma unroll
    for (int p = 0; p < 4; p++) a[p] = lowered(raised(words[j], p, held), some.n[p % 2], some.n[2 + p % 2]);
    begin_products();
    group_mma_by_lines(sum, a[0], a[1], a[2], a[3], columns + 2 * j);
    commit_products();
  }
  stage += stage >= STAGES - DEEP ? DEEP - STAGES : DEEP;
}
wait_products<0>();
hold(sum);
wait_copies<0>();
float* const found = (float*)space;  // [ALL][WHOLE]
float* const own = found + lane % 4 * 2 * WHOLE + warp / 4 * 64 + warp % 4 * 16 + lane / 4;
// The place of this thread's sum[i] among the sums of the thread block.
auto place = [&](int i) { return own + (i / 4 * 8 + i % 2) * WHOLE + i % 4 / 2 * 8; };
#pragma unroll
for (int other = 1; other < DEEP; other++) {
  __syncthreads();
  #pragma unroll
  for (int i = 0; i < 4 * SETS; i++)
    if (turn == other) *place(i) = sum[i];
  __syncthreads();
  #pragma unroll
  for (int i = 0; i < 4 * SETS; i++)
    if (turn == 0) sum[i] += *place(i);
}
if (HIGH == 2 && parts > 1) {
  __shared__ int before;
  constexpr int SUMMED = 128 * HIGH;  // threads
  float4* const all = (float4*)partial + (long)blockIdx.x * parts * SETS * SUMMED + threadIdx.x;
  if (turn == 0)
    #pragma unroll
    for (int i = 0; i < SETS; i++) all[(part * SETS + i) * SUMMED] = *(float4*)&sum[i * 4];
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) before = atomicAdd((int*)arrived + blockIdx.x, 1);
  __syncthreads();
  if (before < parts - 1) return;
  __threadfence();
  if (threadIdx.x == 0) ((int*)arrived)[blockIdx.x] = 0;
  #pragma unroll
  for (int i = 0; i < 4 * SETS; i++) sum[i] = 0;
  #pragma unroll 1
  for (int p = 0; p < parts && turn == 0; p++)
    #pragma unroll
    for (int i = 0; i < SETS; i++) {
      const float4 some = __ldcg(all + (p * SETS + i) * SUMMED);
      float* const four = &sum[i * 4];
      four[0] += some.x;
      four[1] += some.y;
      four[2] += some.z;
      four[3] += some.w;
    }
}
__syncthreads();
#pragma unroll
for (int i = 0; i < 4 * SETS; i++)
  if (turn == 0) *place(i) = sum[i];
__syncthreads();
for (int i = threadIdx.x; i < LINES * EACH / 2; i += THREADS) {
  const int row = i % (EACH / 2) * 2, l = i / (EACH / 2);
  if (first + row >= OUT) continue;
  const float* const sums = found + l * WHOLE + row;
  Some<N, 2> two;
  #pragma unroll
  for (int n = 0; n < 2; n++)
    down(result_of<GATED, BIASED>(sums[n], GATED ? sums[EACH + n] : 0, (const N*)bias, first + row + n, OUT), &two.n[n]);
  *(Some<N, 2>*)((N*)out + (long)(section * ALL + l) * OUT + first + row) = two;
}

// Attention of one token of each row over latent vectors (MLA, here "lines"): all heads read the same
// line of a token, and its first RANK numbers are the value. Writes the token's line and reads the row
// up to it. A thread block has one row, EACH of its heads and one part of the row. Lines come through
// shared memory, TILE at a time and STAGES - 1 tiles ahead. For scores a warp has eight heads or more
// and eight lines; then each warp sums its own numbers of all lines. The order of tokens and numbers in
// the matrices is free as long as both operands agree, so a thread reads neighbouring numbers, and the
// threads of a warp read different banks.
constexpr int WARPS = 8, THREADS = WARPS * 32;
constexpr int SETS = EACH <= 16 ? 1 : 2, ROWS = 16 * SETS, TILE = 64 / SETS, DEEP = TILE / 16;
constexpr int STRIDE = LINE + 16, SCORES = TILE + 4;  // numbers of a line and of scores, with unused ones
constexpr int OWN = RANK / WARPS, WIDE = OWN / 8;  // numbers that a warp sums, and that a thread reads
constexpr float MASKED = -1e30f;
using Piece = Some<unsigned, 4>;
using ValuePart = Some<unsigned, WIDE / 2>;
extern __shared__ uint4 space[];
__shared__ int before;  // see part_sums.cuh
const int thread = threadIdx.x;
auto sync = [] { __syncthreads(); };
N* const lines = (N*)space;  // [STAGES][TILE][STRIDE]
N* const asked = lines + STAGES * TILE * STRIDE;  // [ROWS][STRIDE]
float* const scores = (float*)(asked + ROWS * STRIDE);  // [ROWS][SCORES]

const int row = blockIdx.x, heads_from = blockIdx.y * EACH, part = blockIdx.z;
const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, line = lane >> 2, quarter = lane & 3;
const int position = positions[row], length = position + 1, across = table_shape[1];
const int count = PARTED ? gridDim.z : 1;  // parts of the row
const int each = PARTED ? ((length + count - 1) / count + TILE - 1) / TILE * TILE : length;
const int first = part * each, last = min(length, first + each);
const int* blocks = (const int*)table + (long)row * across;
auto place = [&](int token) -> N* {
  return (N*)pool + ((long)blocks[token / BLOCK] * BLOCK + token % BLOCK) * LINE;
};
auto fetch = [&](int tile) {
  constexpr int PIECES = LINE / 8;  // of 16 bytes
  const int token = first + tile * TILE;
  if (token < last)
    for (int i = threadIdx.x; i < TILE * PIECES; i += THREADS) {
      const int at = i / PIECES, piece = i % PIECES;
      copy(shared_address(lines + ((tile % STAGES) * TILE + at) * STRIDE + piece * 8),
           place(min(token + at, last - 1)) + piece * 8);
    }
  commit_copies();
};
// The thread blocks of other heads write the same line.
if (first < length && last == length)
  for (int d = threadIdx.x; d < LINE; d += THREADS)
    place(position)[d] = ((const N*)fresh)[(long)row * LINE + d];
for (int i = threadIdx.x; i < ROWS * LINE; i += THREADS) {
  const int g = i / LINE, d = i % LINE, head = heads_from + g;
  const bool there = g < EACH && head < HEADS;
  asked[g * STRIDE + d] = there ? ((const N*)q)[((long)row * HEADS + head) * LINE + d] : N{};
}
__syncthreads();
#pragma unroll
for (int tile = 0; tile < STAGES - 1; tile++) fetch(tile);

float most[SETS][2], total[SETS][2], sum[SETS][WIDE][4];
#pragma unroll
for (int set = 0; set < SETS; set++) {
  #pragma unroll
  for (int half = 0; half < 2; half++) { most[set][half] = MASKED; total[set][half] = 0; }
  #pragma unroll
  for (int j = 0; j < WIDE; j++) sum[set][j][0] = sum[set][j][1] = sum[set][j][2] = sum[set][j][3] = 0;
}
// The index of a thread's eight numbers of 64, for the first and the second product.
auto numbers = [&](int sixteen) -> int { return quarter / 2 * 32 + sixteen * 16 + quarter % 2 * 8; };
#pragma unroll 1
for (int tile = 0; first + tile * TILE < last; tile++) {
  const int token = first + tile * TILE;
  const N* const here = lines + tile % STAGES * TILE * STRIDE;
  wait_copies<STAGES - 2>();
  __syncthreads();  // all threads have read what the next lines and scores overwrite
  fetch(tile + STAGES - 1);
  {
    const int set = warp % SETS, eight = warp / SETS;
    float score[2][4] = {};
    const N* const a = asked + (set * 16 + line) * STRIDE;
    const N* const b = here + (eight * 8 + line) * STRIDE;
    #pragma unroll
    for (int c = 0; c < LINE / 64; c++)
      #pragma unroll
      for (int n = 0; n < 2; n++) {
        const int at = c * 64 + numbers(n);
        const Piece low = *(const Piece*)(a + at), high = *(const Piece*)(a + 8 * STRIDE + at);
        const Piece other = *(const Piece*)(b + at);
        const unsigned one[4] = {low.n[0], high.n[0], low.n[1], high.n[1]};
        const unsigned two[4] = {low.n[2], high.n[2], low.n[3], high.n[3]};
        mma(score[0], one, other.n[0], other.n[1], N());
        mma(score[1], two, other.n[2], other.n[3], N());
      }
    #pragma unroll
    for (int i = 0; i < 4; i++) {
      const int at = eight * 8 + 2 * quarter + i % 2;
      scores[(set * 16 + line + i / 2 * 8) * SCORES + at]
          = token + at < last ? (score[0][i] + score[1][i]) * SCALE * 1.4426950408889634f : MASKED;
    }
  }
  __syncthreads();
  unsigned share[SETS][DEEP][4];
  #pragma unroll
  for (int set = 0; set < SETS; set++)
    #pragma unroll
    for (int half = 0; half < 2; half++) {
      const float* const from = scores + (set * 16 + line + half * 8) * SCORES + quarter;
      float one[DEEP][4], top = most[set][half], all = 0;
      #pragma unroll
      for (int k = 0; k < DEEP; k++)
        #pragma unroll
        for (int i = 0; i < 4; i++) {
          one[k][i] = from[k * 16 + i * 4];
          top = fmaxf(top, one[k][i]);
        }
      top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 2));
      #pragma unroll
      for (int k = 0; k < DEEP; k++) {
        #pragma unroll
        for (int i = 0; i < 4; i++) all += one[k][i] = exp2f(one[k][i] - top);
        share[set][k][half] = pair(one[k][0], one[k][1], N());
        share[set][k][half + 2] = pair(one[k][2], one[k][3], N());
      }
      const float shrink = exp2f(most[set][half] - top);
      most[set][half] = top;
      total[set][half] = total[set][half] * shrink + all;
      #pragma unroll
      for (int j = 0; j < WIDE; j++) {
        sum[set][j][2 * half] *= shrink;
        sum[set][j][2 * half + 1] *= shrink;
      }
    }
  #pragma unroll
  for (int k = 0; k < DEEP; k++) {
    ValuePart value[4];
    #pragma unroll
    for (int i = 0; i < 4; i++)
      value[i] = *(const ValuePart*)(here + (k * 16 + i * 4 + quarter) * STRIDE + warp * OWN
                                     + line * WIDE);
    #pragma unroll
    for (int j = 0; j < WIDE; j++) {
      const unsigned which = j % 2 ? 0x7632 : 0x5410;
      const unsigned b0 = __byte_perm(value[0].n[j / 2], value[1].n[j / 2], which);
      const unsigned b1 = __byte_perm(value[2].n[j / 2], value[3].n[j / 2], which);
      #pragma unroll
      for (int set = 0; set < SETS; set++) mma(sum[set][j], share[set][k], b0, b1, N());
    }
  }
}
wait_copies<0>();

const long mine = (long)row * gridDim.y + blockIdx.y;
constexpr int QUERIES = EACH, NUMBERS = RANK, WHOLE = QUERIES * (NUMBERS + 2);
constexpr int MOST_PAIRS = (QUERIES * NUMBERS / 2 + THREADS - 1) / THREADS;
float* const parts = (float*)partial + mine * count * WHOLE;  // see part_sums.cuh
auto least = [](int) -> float { return MASKED; };
auto sunk = [](int, float) -> float { return 0; };
auto to = [&](int i) -> N* {
  const int head = heads_from + i / RANK;
  return head < HEADS ? (N*)out + ((long)row * HEADS + head) * RANK + i % RANK : nullptr;
};
#pragma unroll
for (int set = 0; set < SETS; set++)
  #pragma unroll
  for (int half = 0; half < 2; half++) {
    const int g = set * 16 + line + half * 8;
    float all = total[set][half];
    all += __shfl_xor_sync(0xffffffff, all, 1);
    all += __shfl_xor_sync(0xffffffff, all, 2);
    if (g >= EACH || !to(g * RANK)) continue;
    #pragma unroll
    for (int j = 0; j < WIDE; j++)
      #pragma unroll
      for (int i = 0; i < 2; i++) {
        const int d = warp * OWN + (2 * quarter + i) * WIDE + j;
        const float number = sum[set][j][2 * half + i];
        if (PARTED) parts[part * WHOLE + g * RANK + d] = number;
        else down(number / all, to(g * RANK) + d);
      }
    if (PARTED && warp == 0 && quarter == 0) {
      parts[part * WHOLE + EACH * RANK + g] = most[set][half];
      parts[part * WHOLE + EACH * RANK + EACH + g] = all;
    }
  }

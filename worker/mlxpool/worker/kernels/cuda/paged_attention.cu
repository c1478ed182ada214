// Attention of one token of each row over a block pool: rotates its query and key, writes its key and
// value, and reads the row up to it. Or of TOKENS consecutive tokens of one row, whose keys and values
// are in the pool already. A thread block has one row, one key head and one part of the row; each of its
// warps multiplies TILE tokens at a time in the tensor cores. The queries of the key head are the rows
// of the first operand. The order of a head's numbers in the matrices is free as long as both operands
// agree, so a thread reads neighbouring numbers.
constexpr int ASKED = GROUP * TOKENS;  // queries, token by token
constexpr int TILE = 16, ROWS = ASKED <= 8 ? 8 : 16, SETS = ROWS / 8, HALF = TURNED / 2;
constexpr int THREADS = WARPS * 32;
constexpr int KEY_EACH = SIZE % 32 ? 4 : 8, KEY_CHUNKS = SIZE / (4 * KEY_EACH);
constexpr int VALUE_EACH = SIZE % 32 ? 2 : SIZE % 64 ? 4 : 8, VALUE_CHUNKS = SIZE / (8 * VALUE_EACH);
constexpr float MASKED = -1e30f;
using KeyPart = Some<unsigned, KEY_EACH / 2>;
using ValuePart = Some<unsigned, VALUE_EACH / 2>;
__shared__ alignas(16) N asked[ROWS][SIZE];
__shared__ float warp_most[WARPS][ROWS], warp_total[WARPS][ROWS], warp_sum[WARPS][ASKED][SIZE];
__shared__ int before;  // see part_sums.cuh
const int thread = threadIdx.x;
auto sync = [] { __syncthreads(); };

const int row = blockIdx.x * TOKENS, head = blockIdx.y, part = blockIdx.z;
const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, line = lane >> 2, quarter = lane & 3;
const int position = positions[row], across = table_shape[1];
int length = position + 1;
#pragma unroll
for (int t = 1; t < TOKENS; t++) length = max(length, positions[row + t] + 1);
const int count = PARTED ? gridDim.z : 1;  // parts of the row
auto since = [&](int last) -> int { return WINDOW > 0 ? max(0, last + 1 - WINDOW) : 0; };
const int from = since(position) / TILE * TILE;
const int each = PARTED ? ((length - from + count - 1) / count + TILE - 1) / TILE * TILE : length;
const int first = from + part * each, last = min(length, first + each);
const int* blocks = (const int*)table + (long)row * across;
auto place = [&](int token) -> long {
  return (((long)blocks[token / BLOCK] * HEADS + head) * BLOCK + token % BLOCK) * SIZE;
};
// Prefetches keys and values of a warp's tile into the second-level cache. With many thread blocks it
// is not needed: while some wait for memory, others compute.
auto ask = [&](int token) {
  constexpr int LINES = TILE * SIZE * 2 / 128;
  if (WARPS > 4 && token < last) {
    const long at = place(token);
    #pragma unroll
    for (int i = lane; i < LINES; i += 32) {
      prefetch((const N*)keys + at + i * 64);
      prefetch((const N*)values + at + i * 64);
    }
  }
};
// Rotates a head into `to`: a thread has a pair of numbers that rotates, or two that stay unchanged.
auto turn = [&](const N* numbers, long stride, int row, int i, N* to) {
  const bool turns_it = i < HALF;
  const int one = !turns_it ? 2 * i : TRADITIONAL ? 2 * i : i;
  const int two = !turns_it || TRADITIONAL ? one + 1 : i + HALF;
  float x = up(numbers[one * stride]), y = up(numbers[two * stride]);
  if (turns_it) {
    const float cosine = cosines[row * HALF + i], sine = sines[row * HALF + i];
    const float turned = x * cosine - y * sine;
    y = y * cosine + x * sine;
    x = turned;
  }
  down(x, to + one);
  down(y, to + two);
};
constexpr int PAIRS = SIZE / 2;
#pragma unroll 2
for (int n = 0; n < (ROWS * PAIRS + THREADS - 1) / THREADS; n++) {
  const int i = n * THREADS + threadIdx.x, g = i / PAIRS;
  if (g < ASKED) {
    const int line = row + g / GROUP;
    turn((const N*)q + line * q_strides[0] + (head * GROUP + g % GROUP) * q_strides[1], q_strides[2],
         line, i % PAIRS, asked[g]);
  } else if (g < ROWS) {
    down(0.f, &asked[g][2 * (i % PAIRS)]);
    down(0.f, &asked[g][2 * (i % PAIRS) + 1]);
  }
}
constexpr int STRIDE = WARPS * TILE;
ask(first + warp * TILE);
ask(first + warp * TILE + STRIDE);
if (TOKENS == 1 && first < length && last == length) {
  const long at = place(position);
  #pragma unroll 1
  for (int i = threadIdx.x; i < 2 * PAIRS; i += THREADS) {
    if (i < PAIRS) {
      turn((const N*)k + row * k_strides[0] + head * k_strides[1], k_strides[2], row, i, (N*)keys + at);
    } else {
      const int d = 2 * (i - PAIRS);
      const N* value = (const N*)v + row * v_strides[0] + head * v_strides[1];
      ((N*)values)[at + d] = value[d * v_strides[2]];
      ((N*)values)[at + d + 1] = value[(d + 1) * v_strides[2]];
    }
  }
}
__syncthreads();

unsigned query[SETS][KEY_CHUNKS][KEY_EACH / 2];
#pragma unroll
for (int set = 0; set < SETS; set++)
  #pragma unroll
  for (int c = 0; c < KEY_CHUNKS; c++) {
    KeyPart some = *(const KeyPart*)&asked[line + 8 * set][(c * 4 + quarter) * KEY_EACH];
    #pragma unroll
    for (int i = 0; i < KEY_EACH / 2; i++) query[set][c][i] = some.n[i];
  }
float most[SETS], total[SETS], sum[SIZE / 8][4];
int begin[SETS], end[SETS];  // the tokens that a query sees
#pragma unroll
for (int set = 0; set < SETS; set++) {
  most[set] = MASKED;
  total[set] = 0;
  const int at = TOKENS > 1 ? positions[row + min((line + 8 * set) / GROUP, TOKENS - 1)] : position;
  begin[set] = since(at);
  end[set] = min(at + 1, last);
}
#pragma unroll
for (int j = 0; j < SIZE / 8; j++) sum[j][0] = sum[j][1] = sum[j][2] = sum[j][3] = 0;

for (int token = first + warp * TILE; token < last; token += STRIDE) {
  ask(token + 2 * STRIDE);
  const int left = last - token;
  const long at = place(token);
  const N* const key_from = (const N*)keys + at + quarter * KEY_EACH;
  const N* const value_from = (const N*)values + at + line * VALUE_EACH;
  KeyPart key[2][KEY_CHUNKS];
  ValuePart value[4][VALUE_CHUNKS];
  #pragma unroll
  for (int n = 0; n < 2; n++)
    #pragma unroll
    for (int c = 0; c < KEY_CHUNKS; c++)
      key[n][c] = *(const KeyPart*)(key_from + min(n * 8 + line, left - 1) * SIZE
                                    + c * 4 * KEY_EACH);
  #pragma unroll
  for (int n = 0; n < 4; n++)
    #pragma unroll
    for (int c = 0; c < VALUE_CHUNKS; c++)
      value[n][c] = *(const ValuePart*)(value_from
                                        + min(2 * quarter + n % 2 + n / 2 * 8, left - 1) * SIZE
                                        + c * 8 * VALUE_EACH);
  float score[2][4];
  #pragma unroll
  for (int n = 0; n < 2; n++) {
    score[n][0] = score[n][1] = score[n][2] = score[n][3] = 0;
    #pragma unroll
    for (int c = 0; c < KEY_CHUNKS; c++)
      #pragma unroll
      for (int i = 0; i < KEY_EACH / 2; i += 2) {
        unsigned low = query[0][c][i], high = query[0][c][i + 1];
        unsigned a[4] = {low, SETS > 1 ? query[SETS - 1][c][i] : 0, high,
                         SETS > 1 ? query[SETS - 1][c][i + 1] : 0};
        mma(score[n], a, key[n][c].n[i], key[n][c].n[i + 1], N());
      }
  }
  unsigned share[4] = {0, 0, 0, 0};
  float shrink[2] = {1, 1};
  #pragma unroll
  for (int set = 0; set < SETS; set++) {
    float top = most[set];
    #pragma unroll
    for (int n = 0; n < 2; n++)
      #pragma unroll
      for (int i = 0; i < 2; i++) {
        float& one = score[n][2 * set + i];
        const int here = token + n * 8 + 2 * quarter + i;
        const bool seen = here < end[set] && here >= begin[set];
        one = seen ? one * SCALE * 1.4426950408889634f : MASKED;
        top = fmaxf(top, one);
      }
    top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 1));
    top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 2));
    shrink[set] = exp2f(most[set] - top);
    most[set] = top;
    total[set] *= shrink[set];
    #pragma unroll
    for (int n = 0; n < 2; n++) {
      float low = exp2f(score[n][2 * set] - top), high = exp2f(score[n][2 * set + 1] - top);
      total[set] += low + high;
      share[2 * n + set] = pair(low, high, N());
    }
  }
  #pragma unroll
  for (int c = 0; c < VALUE_CHUNKS; c++)
    #pragma unroll
    for (int j = 0; j < VALUE_EACH; j++) {
      float(&one)[4] = sum[c * VALUE_EACH + j];
      one[0] *= shrink[0];
      one[1] *= shrink[0];
      if (SETS > 1) { one[2] *= shrink[1]; one[3] *= shrink[1]; }
      unsigned which = j % 2 ? 0x7632 : 0x5410;
      mma(one, share, __byte_perm(value[0][c].n[j / 2], value[1][c].n[j / 2], which),
          __byte_perm(value[2][c].n[j / 2], value[3][c].n[j / 2], which), N());
    }
}

#pragma unroll
for (int set = 0; set < SETS; set++) {
  const int g = line + 8 * set;
  total[set] += __shfl_xor_sync(0xffffffff, total[set], 1);
  total[set] += __shfl_xor_sync(0xffffffff, total[set], 2);
  if (quarter == 0) { warp_most[warp][g] = most[set]; warp_total[warp][g] = total[set]; }
  if (g < ASKED)
    #pragma unroll
    for (int c = 0; c < VALUE_CHUNKS; c++)
      #pragma unroll
      for (int j = 0; j < VALUE_EACH; j++)
        #pragma unroll
        for (int i = 0; i < 2; i++)
          warp_sum[warp][g][(c * 8 + 2 * quarter + i) * VALUE_EACH + j]
              = sum[c * VALUE_EACH + j][2 * set + i];
}
__syncthreads();
// A query's sink: its term of the softmax sum, and its score; all scores are of base 2 here.
auto sunk = [&](int g, float top) -> float {
  return SINKS ? exp2f(sinks[head * GROUP + g % GROUP] * 1.4426950408889634f - top) : 0.f;
};
auto least = [&](int g) -> float {
  return SINKS ? sinks[head * GROUP + g % GROUP] * 1.4426950408889634f : MASKED;
};
auto to = [&](int i) -> N* {
  const int g = i / SIZE;
  const long line = ((long)row + g / GROUP) * HEADS + head;
  return (N*)out + (line * GROUP + g % GROUP) * SIZE + i % SIZE;
};
const long mine = (long)blockIdx.x * HEADS + head;
constexpr int QUERIES = ASKED, NUMBERS = SIZE, WHOLE = QUERIES * (NUMBERS + 2);
constexpr int MOST_PAIRS = (QUERIES * NUMBERS / 2 + THREADS - 1) / THREADS;
float* const parts = (float*)partial + mine * count * WHOLE;  // see part_sums.cuh
#pragma unroll 1
for (int i = threadIdx.x; i < ASKED * SIZE; i += THREADS) {
  const int g = i / SIZE, d = i % SIZE;
  float top = PARTED ? MASKED : least(g);
  for (int w = 0; w < WARPS; w++) top = fmaxf(top, warp_most[w][g]);
  float numbers = 0, all = 0;
  for (int w = 0; w < WARPS; w++) {
    float weight = exp2f(warp_most[w][g] - top);
    numbers += weight * warp_sum[w][g][d];
    all += weight * warp_total[w][g];
  }
  if (!PARTED) {
    down(numbers / (all + sunk(g, top)), to(i));
  } else {
    parts[part * WHOLE + i] = numbers;
    if (d == 0) {
      parts[part * WHOLE + ASKED * SIZE + g] = top;
      parts[part * WHOLE + ASKED * SIZE + ASKED + g] = all;
    }
  }
}

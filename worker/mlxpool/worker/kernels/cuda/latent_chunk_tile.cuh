// A tile of ragged_latents.cu with many rows: as latent_tile.cuh, but its 64 rows are the lines of the tensor
// cores' matrices, and two groups of four warps work at different times. Group 0 has the even tiles of 64 latents,
// group 1 the odd tiles. A group copies its own latents, multiplies them with the queries, and gives the shares to
// the other group, through the panel of the latents after their values. Each group adds up its half of the RANK
// numbers of all latents. While one group computes shares, the other multiplies. The file follows group_mma and
// group_mma_values of VALUE_NUMBERS / 8 sets.
template <int HEADS, int EACH, int LINE, int RANK, int BLOCK, int VALUE_NUMBERS, typename N, typename Finish>
__device__ inline void latent_chunk_tile(const LatentTile<N>& tile, float rate, char* space, Finish finish) {
  constexpr int ROWS = 64, PANELS = LINE / 64, HALF = RANK / 2, PRODUCTS = HALF / VALUE_NUMBERS;
  constexpr int PANEL = TILE_KEYS * 128, STAGE = PANELS * PANEL, QUERIES_AT = 2 * STAGE;  // bytes
  static_assert(LINE > RANK && HALF % VALUE_NUMBERS == 0 && VALUE_NUMBERS % 64 == 0, "sizes");
  // Barriers of a group alone, of shares, and of latents that the other group has multiplied: one a group.
  constexpr int GROUP = 1, SHARES = 3, FREE = 5;
  const int thread = threadIdx.x, lane = thread & 31, group = thread / 128, mine = thread % 128;
  const int quarter = lane & 3, row = mine / 32 * 16 + (lane >> 2);  // and row + 8
  const int asked = tile.lines * EACH;
  const float NONE = __uint_as_float(0xff800000);  // -infinity
  const unsigned unaligned = shared_address(space), base = (unaligned + 1023) & ~1023u;
  char* const aligned = space + (base - unaligned);
  float* const tops = (float*)(aligned + QUERIES_AT + PANELS * ROWS * 128);  // [2][ROWS]: of each group
  float* const totals = tops + 2 * ROWS;  // [2][ROWS]
  // A lambda of the template: calls with it are checked only if the tile is used; otherwise group_mma has other sizes.
  auto matrix = [](unsigned at, unsigned long long apart = 64) { return matrix_at(at, apart); };
  const int count = max(tile.last - tile.first + TILE_KEYS - 1, 0) / TILE_KEYS;
  // Copies tile t, of this group, to its stage: eight threads 128 bytes of a line, panel by panel.
  auto fetch = [&](int t) {
    const int token = tile.first + t * TILE_KEYS;
    if (t < count) {
      const long block = tile.table[token / BLOCK];
      const N* const from = tile.pool + (block * BLOCK + token % BLOCK) * LINE + mine % 8 * 8;
      #pragma unroll
      for (int n = 0; n < TILE_KEYS / 16; n++) {
        const int at = mine / 8 + n * 16;
        const N* const numbers = from + min(at, tile.last - 1 - token) * LINE;
        const unsigned to = base + group * STAGE + at * 128 + ((mine ^ at) & 7) * 16;
        #pragma unroll
        for (int panel = 0; panel < PANELS; panel++) copy(to + panel * PANEL, numbers + panel * 64);
      }
    }
    commit_copies();
  };
  if (count > 0)
    for (int i = thread; i < ROWS * PANELS * 8; i += TILE_THREADS) {
      const int g = i / (PANELS * 8), piece = i % (PANELS * 8);
      const unsigned at = QUERIES_AT + piece / 8 * ROWS * 128 + g * 128 + ((piece ^ g) & 7) * 16;
      if (g < asked) copy(base + at, tile.queries + ((long)(g / EACH) * HEADS + g % EACH) * LINE + piece * 8);
      else *(uint4*)(aligned + at) = uint4{0, 0, 0, 0};
    }
  fetch(group);
  auto stop_of = [&](int g) -> int {  // the latents that a row sees
    return min(tile.lines == 1 ? tile.high : tile.ends[min(g, asked - 1) / EACH], tile.last);
  };
  const int stop[2] = {stop_of(row), stop_of(row + 8)}, least_stop = stop_of(0);  // of the first line
  float sum[PRODUCTS][VALUE_NUMBERS / 2], most[2] = {NONE, NONE}, total[2] = {0, 0};
  #pragma unroll
  for (int n = 0; n < PRODUCTS; n++)
    #pragma unroll
    for (int i = 0; i < VALUE_NUMBERS / 2; i++) sum[n][i] = 0;
  // Takes new greatest scores: scales the sums so far to them.
  auto raise = [&](const float (&top)[2]) {
    float shrink[2];
    #pragma unroll
    for (int half = 0; half < 2; half++) {
      shrink[half] = power2(most[half] - (top[half] == NONE ? 0.f : top[half]));
      most[half] = top[half];
      total[half] *= shrink[half];
    }
    if (shrink[0] != 1 || shrink[1] != 1)  // seldom, after some latents
      #pragma unroll
      for (int n = 0; n < PRODUCTS; n++)
        #pragma unroll
        for (int i = 0; i < VALUE_NUMBERS / 2; i++) sum[n][i] *= shrink[i / 2 % 2];
    __syncwarp();
  };
  auto multiply = [&](const unsigned (&share)[4][4], int stage) {
    #pragma unroll
    for (int n = 0; n < PRODUCTS; n++) hold(sum[n]);
    begin_products();
    #pragma unroll
    for (int k = 0; k < TILE_KEYS / 16; k++)
      #pragma unroll
      for (int n = 0; n < PRODUCTS; n++)
        group_mma_values(sum[n], share[k][0], share[k][1], share[k][2], share[k][3],
                         matrix(base + stage * STAGE + (group * HALF + n * VALUE_NUMBERS) / 64 * PANEL + k * 2048,
                                PANEL / 16));
    commit_products();
  };
  auto hold_sums = [&] {
    #pragma unroll
    for (int n = 0; n < PRODUCTS; n++) hold(sum[n]);
  };
  // The shares of each thread are stored in the order of its registers; the same thread of the other group takes them.
  auto shares_of = [&](int stage) -> uint4* { return (uint4*)(aligned + stage * STAGE + (PANELS - 1) * PANEL) + mine; };
  // Begins to multiply a tile of the other group.
  auto multiply_other = [&] {
    const int other = group ^ 1;
    sync_team<TILE_THREADS>(SHARES + other);
    const float top[2] = {tops[other * ROWS + row], tops[other * ROWS + row + 8]};
    unsigned share[4][4];
    #pragma unroll
    for (int k = 0; k < 4; k++) {
      const uint4 four = shares_of(other)[k * 128];
      share[k][0] = four.x, share[k][1] = four.y, share[k][2] = four.z, share[k][3] = four.w;
    }
    raise(top);
    multiply(share, other);
  };
  wait_copies<0>();
  fence_products();
  __syncthreads();
  #pragma unroll 1
  for (int t = group; t < count; t += 2) {
    const int token = tile.first + t * TILE_KEYS;
    if (t > 1) {
      wait_copies<0>();
      fence_products();
      sync_team<128>(GROUP + group);
    }
    float score[TILE_KEYS / 2];
    #pragma unroll
    for (int i = 0; i < TILE_KEYS / 2; i++) score[i] = 0;
    hold(score);
    begin_products();
    #pragma unroll
    for (int c = 0; c < LINE / 16; c++)
      group_mma(score, matrix(base + QUERIES_AT + c / 4 * ROWS * 128) + c % 4 * 2,
                matrix(base + group * STAGE + c / 4 * PANEL) + c % 4 * 2);
    commit_products();
    if (t > 0) {
      multiply_other();
      wait_products<1>();
    } else {
      wait_products<0>();
    }
    hold(score);
    if (token + TILE_KEYS > least_stop) {  // the first of neighbouring lines sees the fewest
      #pragma unroll
      for (int i = 0; i < TILE_KEYS / 2; i++)
        if (token + i / 4 * 8 + 2 * quarter + i % 2 >= stop[i / 2 % 2]) score[i] = NONE;
    }
    unsigned share[4][4];
    float top[2], all[2];
    #pragma unroll
    for (int half = 0; half < 2; half++) {
      float found = NONE;
      #pragma unroll
      for (int j = 2 * half; j < TILE_KEYS / 2; j += 4) found = fmaxf(found, fmaxf(score[j], score[j + 1]));
      found = fmaxf(found, __shfl_xor_sync(0xffffffff, found, 1));
      found = fmaxf(found, __shfl_xor_sync(0xffffffff, found, 2));
      top[half] = fmaxf(most[half], found * rate);
      const float less = top[half] == NONE ? 0.f : top[half];
      all[half] = 0;
      #pragma unroll
      for (int j = 0; j < TILE_KEYS / 8; j++) {
        const float left = power2(fmaf(score[4 * j + 2 * half], rate, -less));
        const float right = power2(fmaf(score[4 * j + 2 * half + 1], rate, -less));
        all[half] += left + right;
        share[j / 2][j % 2 * 2 + half] = pair(left, right, N());
      }
      if (quarter == 0) tops[group * ROWS + row + 8 * half] = top[half];
    }
    #pragma unroll
    for (int k = 0; k < 4; k++) shares_of(group)[k * 128] = uint4{share[k][0], share[k][1], share[k][2], share[k][3]};
    arrive_team<TILE_THREADS>(SHARES + group);
    wait_products<0>();
    hold_sums();
    if (t > 0 && t + 1 < count) arrive_team<TILE_THREADS>(FREE + (group ^ 1));
    raise(top);
    total[0] += all[0];
    total[1] += all[1];
    multiply(share, group);
    wait_products<0>();
    hold_sums();
    if (t + 2 < count) {
      sync_team<TILE_THREADS>(FREE + group);
      fetch(t + 2);
    }
  }
  if (count > 0 && (count - 1) % 2 != group) {
    multiply_other();
    wait_products<0>();
    hold_sums();
  }
  wait_copies<0>();
  #pragma unroll
  for (int half = 0; half < 2; half++) {
    total[half] += __shfl_xor_sync(0xffffffff, total[half], 1);
    total[half] += __shfl_xor_sync(0xffffffff, total[half], 2);
    if (quarter == 0) totals[group * ROWS + row + 8 * half] = total[half];
  }
  __syncthreads();  // all products have been computed
  float* const sums = (float*)aligned;  // [ROWS][RANK + 4], in the memory of latents
  #pragma unroll
  for (int n = 0; n < PRODUCTS; n++)
    #pragma unroll
    for (int i = 0; i < VALUE_NUMBERS / 2; i += 2) {
      const int d = group * HALF + n * VALUE_NUMBERS + i / 4 * 8 + quarter * 2;
      *(float2*)(sums + (row + i / 2 % 2 * 8) * (RANK + 4) + d) = float2{sum[n][i], sum[n][i + 1]};
    }
  if (thread < ROWS) totals[thread] += totals[ROWS + thread];
  if (group == 0 && quarter == 0)
    #pragma unroll
    for (int half = 0; half < 2; half++) tops[row + 8 * half] = fmaxf(most[half], -1e30f);
  __syncthreads();
  finish(sums, tops, totals);
}

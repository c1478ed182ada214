// A tile of ragged_latents.cu: 8 * SETS rows, which are heads of neighbouring lines of a row, and some of the
// row's latents [LINE]. Both products have the latents first: scores are latents times queries, 64 latents at a
// time, and sums are values (the transposed latents) times shares, so the rows of a tile are the columns of the
// tensor cores' matrices, in steps of eight. The first of two groups of four warps computes the scores, then
// each group the sums of its half of the RANK numbers, while the next latents are copied. All matrices in
// shared memory are panels of 64 numbers of each line: 128 bytes, whose 16-byte pieces are swizzled differently
// in each of eight lines. The file follows group_mma and group_mma_columns, see matmul_tiled.py.
constexpr int TILE_KEYS = 64, TILE_THREADS = 256;
template <int COUNT> struct TileRows { static constexpr int ALL = COUNT; };
template <typename N> struct LatentTile {
  const N* pool;  // [blocks, BLOCK, LINE]
  const int* table;  // the blocks of the row
  const int* ends;  // of each line: the latents that it sees
  const N* queries;  // [HEADS, LINE] of each line, from the first head of the tile on
  int lines, first, last, high;  // the tile reads latents [first, last) of `high`
};
// Calls `finish(sums, most, total)` with all threads: the sums of row g at sums + g * (RANK + 4), the greatest
// score and the total, in shared memory. Without latents these are 0, -1e30 and 0.
template <int SETS, int HEADS, int EACH, int LINE, int RANK, int BLOCK, typename N, typename Finish>
__device__ inline void latent_tile(const LatentTile<N>& tile, float rate, char* space, Finish finish) {
  constexpr int ROWS = 8 * SETS, PANELS = LINE / 64, OWN = RANK / 128;
  constexpr int STAGE = TILE_KEYS * LINE * 2, QUERIES_AT = 2 * STAGE, SHARES_AT = QUERIES_AT + ROWS * LINE * 2;
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, group = thread / 128;
  const int row = lane >> 2, quarter = lane & 3, asked = tile.lines * EACH;
  const float NONE = __uint_as_float(0xff800000);  // -infinity
  const unsigned unaligned = shared_address(space), base = (unaligned + 1023) & ~1023u;
  char* const aligned = space + (base - unaligned);
  char* const shares = aligned + SHARES_AT;  // [ROWS] lines of TILE_KEYS numbers
  float* const tops = (float*)(shares + ROWS * 128);  // [ROWS][4]: of each warp of the first group
  float* const shrinks = tops + ROWS * 4;  // [ROWS]
  float* const totals = shrinks + ROWS;  // [ROWS]
  int* const stops = (int*)(totals + ROWS);  // [ROWS]: the latents that a row sees
  auto block_of = [&](int token) -> long { return tile.table[min(token, tile.last - 1) / BLOCK]; };
  // Eight threads copy 128 bytes of a line, panel by panel.
  auto fetch = [&](int token, long block, int stage) {
    if (token < tile.last) {
      const N* const from = tile.pool + (block * BLOCK + token % BLOCK) * LINE + thread % 8 * 8;
      #pragma unroll
      for (int n = 0; n < TILE_KEYS * 8 / TILE_THREADS; n++) {
        const int at = thread / 8 + n * (TILE_THREADS / 8);
        const N* const mine = from + min(at, tile.last - 1 - token) * LINE;
        const unsigned to = base + stage * STAGE + at * 128 + ((thread ^ at) & 7) * 16;
        #pragma unroll
        for (int panel = 0; panel < PANELS; panel++) copy(to + panel * TILE_KEYS * 128, mine + panel * 64);
      }
    }
    commit_copies();
  };
  float sum[OWN][4 * SETS];
  #pragma unroll
  for (int own = 0; own < OWN; own++)
    #pragma unroll
    for (int i = 0; i < 4 * SETS; i++) sum[own][i] = 0;
  // A thread of the first group has two rows of each set, and of a tile two latents for each of them.
  float most[2 * SETS], total[2 * SETS];
  #pragma unroll
  for (int j = 0; j < 2 * SETS; j++) {
    most[j] = NONE;
    total[j] = 0;
  }
  // They come from memory while queries are copied.
  const long first_block = block_of(max(tile.first, 0)), second_block = block_of(tile.first + TILE_KEYS);
  long block = block_of(tile.first + 2 * TILE_KEYS);
  for (int g = thread; g < ROWS; g += TILE_THREADS)
    stops[g] = min(tile.lines == 1 ? tile.high : tile.ends[min(g, asked - 1) / EACH], tile.last);
  if (tile.first < tile.last) {
    for (int i = thread; i < ROWS * PANELS * 8; i += TILE_THREADS) {
      const int g = i / (PANELS * 8), piece = i % (PANELS * 8);
      const unsigned at = QUERIES_AT + piece / 8 * ROWS * 128 + g * 128 + ((piece ^ g) & 7) * 16;
      if (g < asked) copy(base + at, tile.queries + ((long)(g / EACH) * HEADS + g % EACH) * LINE + piece * 8);
      else *(uint4*)(aligned + at) = uint4{0, 0, 0, 0};
    }
  }
  fetch(tile.first, first_block, 0);
  fetch(tile.first + TILE_KEYS, second_block, 1);
  int stage = 0;
  #pragma unroll 1
  for (int token = tile.first; token < tile.last; token += TILE_KEYS) {
    const long next_block = block_of(token + 3 * TILE_KEYS);  // long before it is needed
    const unsigned here = base + stage * STAGE;
    wait_copies<1>();
    fence_products();
    __syncthreads();
    bool moves = false;  // whether sums have to be multiplied by a factor below 1
    if (group == 0) {
      float score[4 * SETS];
      #pragma unroll
      for (int i = 0; i < 4 * SETS; i++) score[i] = 0;
      hold(score);
      begin_products();
      #pragma unroll
      for (int c = 0; c < LINE / 16; c++)
        group_mma(score, matrix_at(here + c / 4 * TILE_KEYS * 128, 64) + c % 4 * 2,
                  matrix_at(base + QUERIES_AT + c / 4 * ROWS * 128, 64) + c % 4 * 2);
      commit_products();
      wait_products<0>();
      hold(score);
      const int mine = warp * 16 + row;  // and latent mine + 8
      if (token + TILE_KEYS > stops[0]) {  // the first of neighbouring lines sees the fewest
        #pragma unroll
        for (int i = 0; i < 4 * SETS; i++)
          if (token + mine + i / 2 % 2 * 8 >= stops[i / 4 * 8 + quarter * 2 + i % 2]) score[i] = NONE;
      }
      #pragma unroll
      for (int j = 0; j < 2 * SETS; j++) {
        float top = fmaxf(score[j / 2 * 4 + j % 2], score[j / 2 * 4 + j % 2 + 2]);
        #pragma unroll
        for (int other = 4; other < 32; other *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, other));
        if (row == 0) tops[(j / 2 * 8 + quarter * 2 + j % 2) * 4 + warp] = top;
      }
      sync_team<128>(1);
      #pragma unroll
      for (int j = 0; j < 2 * SETS; j++) {
        const int g = j / 2 * 8 + quarter * 2 + j % 2;
        const float4 four = *(const float4*)(tops + g * 4);
        const float top = fmaxf(most[j], fmaxf(fmaxf(four.x, four.y), fmaxf(four.z, four.w)) * rate);
        const float less = top == NONE ? 0.f : top, shrink = power2(most[j] - less);
        moves |= shrink != 1;
        most[j] = top;
        if (warp == 0 && row == 0) shrinks[g] = shrink;
        float all = 0;
        #pragma unroll
        for (int half = 0; half < 2; half++) {
          const float share = power2(fmaf(score[j / 2 * 4 + j % 2 + 2 * half], rate, -less));
          all += share;
          // Latent warp * 16 + half * 8 + row is number `row` of piece 2 * warp + half.
          down(share, (N*)(shares + g * 128 + ((2 * warp + half ^ g) & 7) * 16) + row);
        }
        total[j] = total[j] * shrink + all;
      }
      fence_products();
    }
    if (__syncthreads_or(moves)) {  // seldom, after some latents
      #pragma unroll
      for (int set = 0; set < SETS; set++) {
        const float2 two = *(const float2*)(shrinks + set * 8 + quarter * 2);
        #pragma unroll
        for (int own = 0; own < OWN; own++) {
          sum[own][4 * set] *= two.x;
          sum[own][4 * set + 1] *= two.y;
          sum[own][4 * set + 2] *= two.x;
          sum[own][4 * set + 3] *= two.y;
        }
      }
    }
    #pragma unroll
    for (int own = 0; own < OWN; own++) hold(sum[own]);
    begin_products();
    #pragma unroll
    for (int k = 0; k < TILE_KEYS / 16; k++)
      #pragma unroll
      for (int own = 0; own < OWN; own++)
        group_mma_columns(sum[own], matrix_at(here + (group * OWN + own) * TILE_KEYS * 128 + k * 16 * 128, 64),
                          matrix_at(base + SHARES_AT, 64) + k * 2);
    commit_products();
    wait_products<0>();
    #pragma unroll
    for (int own = 0; own < OWN; own++) hold(sum[own]);
    __syncthreads();  // all threads have multiplied the latents and shares that the next ones overwrite
    fetch(token + 2 * TILE_KEYS, block, stage);
    block = next_block;
    stage ^= 1;
  }
  wait_copies<0>();
  // The greatest scores and totals of all four warps.
  if (group == 0)
    #pragma unroll
    for (int j = 0; j < 2 * SETS; j++) {
      const int g = j / 2 * 8 + quarter * 2 + j % 2;
      #pragma unroll
      for (int other = 4; other < 32; other *= 2) total[j] += __shfl_xor_sync(0xffffffff, total[j], other);
      if (row == 0) tops[g * 4 + warp] = total[j];
      if (row == 0 && warp == 0) shrinks[g] = fmaxf(most[j], -1e30f);
    }
  float* const sums = (float*)aligned;  // [ROWS][RANK + 4], in the memory of latents
  #pragma unroll
  for (int own = 0; own < OWN; own++)
    #pragma unroll
    for (int i = 0; i < 4 * SETS; i++) {
      const int g = i / 4 * 8 + quarter * 2 + i % 2;
      const int d = (group * OWN + own) * 64 + warp % 4 * 16 + row + i / 2 % 2 * 8;
      sums[g * (RANK + 4) + d] = sum[own][i];
    }
  __syncthreads();
  for (int g = thread; g < ROWS; g += TILE_THREADS) {
    const float4 four = *(const float4*)(tops + g * 4);
    totals[g] = four.x + four.y + four.z + four.w;
  }
  __syncthreads();
  finish(sums, shrinks, totals);
}

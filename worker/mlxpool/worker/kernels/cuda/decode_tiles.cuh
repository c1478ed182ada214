// The tiles of lines that decode: the second part of ragged_attention.cu, after stored_numbers.cuh or
// stored_integers.cuh.
if (decodes) {
  // Each warp has DECODE_STAGES tiles of keys and of values in shared memory: the tile that it multiplies and
  // the tiles in flight. The memory of a tile's keys is free, and filled anew, before that of its values.
  constexpr int TILE = 16, ROWS = DECODE_ROWS, SETS = ROWS / 8;
  constexpr int EACH = 16 / sizeof(Stored), PIECES = SIZE / EACH;  // numbers of 16 bytes
  constexpr int SCALES_AT = TILE * LINE, MATRIX = SCALES_AT + TILE * SCALE_BYTES;  // bytes
  constexpr int PENDING = 2 * DECODE_STAGES - 1;  // groups of copies
  const unsigned tiles = warp * DECODE_STAGES * 2 * MATRIX, base = shared_address(space) + tiles;
  const int* const blocks = (const int*)tables + table_at;
  auto block_of = [&](int token) -> long { return blocks[min(token, last - 1) / BLOCK]; };
  // The scales of values come with the keys: shares are multiplied by them before the values arrive.
  auto fetch = [&](const void* pool, bool with_scales, int token, long block, unsigned into) {
    if (token < last) {
      const long at = (block * HEADS + head) * BLOCK + token % BLOCK;
      const Stored* const from = (const Stored*)pool + at * SIZE;
      if (token >= low && token + TILE <= last) {
        #pragma unroll
        for (int n = 0; n < TILE * PIECES / 32; n++) {
          const int i = n * 32 + lane;
          copy(into + i / PIECES * LINE + i % PIECES * 16, from + i * EACH);
        }
      } else {
        #pragma unroll 1
        for (int i = lane; i < TILE * PIECES; i += 32)
          copy(into + i / PIECES * LINE + i % PIECES * 16,
               from + (inside(token + i / PIECES) - token) * SIZE + i % PIECES * EACH);
      }
      if (with_scales && lane < TILE / 8) copy_scales(into + SCALES_AT, into + MATRIX + SCALES_AT, at, lane);
    }
    commit_copies();
  };
  const long turned_at = TURNED > 0 ? (long)first_line * (TURNED / 2) : 0;
  auto turned = [&](const N* numbers, long stride, int d) -> float {
    return rotated<N, TURNED, TRADITIONAL>(numbers, stride, d, (const float*)cosines + turned_at,
                                           (const float*)sines + turned_at);
  };
  if (FRESH && STORES && first < last && last == high_key) {
    auto key = [&](int d) -> N {
      N rounded;
      down(turned(k_from + first_line * k_line + head * k_head, k_number, d), &rounded);
      return rounded;
    };
    auto value = [&](int d) -> N { return v_from[first_line * v_line + head * v_head + d * v_number]; };
    store_fresh(slot(high_key - 1), key, value);
    sync();
  }
  int token = first + warp * TILE;
  if (token + TILE <= low) token += STEP;
  #pragma unroll
  for (int stage = 0; stage < DECODE_STAGES; stage++) {
    const long block = block_of(token + stage * STEP);
    fetch(keys, true, token + stage * STEP, block, base + stage * 2 * MATRIX);
    fetch(values, false, token + stage * STEP, block, base + stage * 2 * MATRIX + MATRIX);
  }
  long block = block_of(token + DECODE_STAGES * STEP);
  unsigned query[SETS][SIZE / 16][2];
  float most[SETS], total[SETS], sum[SIZE / 8][4];
  int begin[SETS], end[SETS];
  #pragma unroll
  for (int set = 0; set < SETS; set++) {
    const int g = min(row + 8 * set, asked - 1);
    const N* const numbers = query_at(g);
    #pragma unroll
    for (int c = 0; c < SIZE / 16; c++)
      #pragma unroll
      for (int i = 0; i < 2; i++) {
        const int at = c * 16 + query_number(i);
        query[set][c][i] = FRESH ? pair(turned(numbers, q_number, at), turned(numbers, q_number, at + 1), N())
                           : neat ? *(const unsigned*)(numbers + at)
                                : pair(up(numbers[at * q_number]), up(numbers[(at + 1) * q_number]), N());
      }
    most[set] = NONE;
    total[set] = 0;
    begin[set] = begin_of(g / GROUP);
    end[set] = min(end_of(g / GROUP), last);
  }
  #pragma unroll
  for (int j = 0; j < SIZE / 8; j++) sum[j][0] = sum[j][1] = sum[j][2] = sum[j][3] = 0;
  unsigned here = 0;  // bytes before the stage
  #pragma unroll 1
  for (; token < last; token += STEP) {
    const int next = token + DECODE_STAGES * STEP;
    const long next_block = block_of(next + STEP);  // long before it is needed
    wait_copies<PENDING>();
    __syncwarp();
    float score[2][4];
    #pragma unroll
    for (int n = 0; n < 2; n++) score[n][0] = score[n][1] = score[n][2] = score[n][3] = 0;
    #pragma unroll
    for (int c = 0; c < SIZE / 16; c++) {
      unsigned b[4];
      load_keys(b, tiles + here + c * 16 * sizeof(Stored));
      const unsigned a[4] = {query[0][c][0], SETS > 1 ? query[SETS - 1][c][0] : 0, query[0][c][1],
                             SETS > 1 ? query[SETS - 1][c][1] : 0};
      mma(score[0], a, b[0], b[1], N());
      mma(score[1], a, b[2], b[3], N());
    }
    Scales by[2];
    #pragma unroll
    for (int n = 0; n < 2; n++) {
      const unsigned at = tiles + here + SCALES_AT + n * 16;
      by[n] = scales_of(at, at + MATRIX, token + n * 8);
      scale_scores(score[n], by[n]);
    }
    __syncwarp();
    fetch(keys, true, next, block, base + here);
    unsigned share[4] = {0, 0, 0, 0};
    float shrink[2] = {1, 1};
    const bool masked = lines > 1 || token < low || token + TILE > last;
    #pragma unroll
    for (int set = 0; set < SETS; set++) {
      float top = most[set];
      #pragma unroll
      for (int n = 0; n < 2; n++)
        #pragma unroll
        for (int i = 0; i < 2; i++) {
          float& one = score[n][2 * set + i];
          const int at = token + n * 8 + 2 * quarter + i;
          one = scored(one) * RATE;
          if (masked && (at >= end[set] || at < begin[set])) one = NONE;
          top = fmaxf(top, one);
        }
      top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 2));
      const float less = top == NONE ? 0.f : top;
      shrink[set] = power2(most[set] - less);
      most[set] = top;
      total[set] *= shrink[set];
      #pragma unroll
      for (int n = 0; n < 2; n++) {
        const float left = power2(score[n][2 * set] - less), right = power2(score[n][2 * set + 1] - less);
        total[set] += left + right;
        share[2 * n + set] = share_pair(left, right, by[n]);
      }
    }
    #pragma unroll
    for (int j = 0; j < SIZE / 8; j++) {
      sum[j][0] *= shrink[0];
      sum[j][1] *= shrink[0];
      if (SETS > 1) { sum[j][2] *= shrink[1]; sum[j][3] *= shrink[1]; }
    }
    wait_copies<PENDING>();
    __syncwarp();
    #pragma unroll
    for (int c = 0; c < PIECES / 2; c++) {
      unsigned b[2 * VALUE_MATRICES];
      load_values(b, tiles + here + MATRIX + c * 32);
      #pragma unroll
      for (int j = 0; j < VALUE_MATRICES; j++)
        mma(sum[VALUE_MATRICES * c + j], share, b[2 * j], b[2 * j + 1], N());
    }
    __syncwarp();
    fetch(values, false, next, block, base + here + MATRIX);
    block = next_block;
    if (DECODE_STAGES > 1) here = here == (DECODE_STAGES - 1) * 2 * MATRIX ? 0 : here + 2 * MATRIX;
  }
  sync();  // all warps have read their tiles, which the sums overwrite
  float* const warp_most = (float*)space;  // see decode_sums.cuh
  float* const warp_total = warp_most + WARPS * ROWS;
  float* const warp_sum = warp_total + WARPS * ROWS;
  #pragma unroll
  for (int set = 0; set < SETS; set++) {
    const int g = row + 8 * set;
    total[set] += __shfl_xor_sync(0xffffffff, total[set], 1);
    total[set] += __shfl_xor_sync(0xffffffff, total[set], 2);
    if (quarter == 0) {
      warp_most[warp * ROWS + g] = most[set];
      warp_total[warp * ROWS + g] = total[set];
    }
    if (g < asked) put_sums(warp_sum + (warp * ROWS + g) * SIZE, sum, set);
  }
}

// As decode_tiles.cuh, over 8-bit keys and values. Integers are numbers of the tensor cores as they are: the
// scale of a key multiplies its scores, that of a value the shares of it. The order of a head's numbers in
// the matrices is free as long as both operands agree, so a lane reads four neighbouring integers.
if (decodes) {
  constexpr int TILE = 16, ROWS = DECODE_ROWS, SETS = ROWS / 8, LINE = SIZE + 16, PIECES = SIZE / 16;
  constexpr int SCALES_AT = TILE * LINE, MATRIX = SCALES_AT + TILE * 2;  // bytes
  constexpr int PENDING = 2 * DECODE_STAGES - 1;  // groups of copies
  const unsigned base = shared_address(space) + warp * DECODE_STAGES * 2 * MATRIX;
  const char* const tiles = (const char*)space + warp * DECODE_STAGES * 2 * MATRIX;
  const int* const blocks = (const int*)tables + table_at;
  auto block_of = [&](int token) -> long { return blocks[min(token, last - 1) / BLOCK]; };
  auto fetch = [&](const void* pool, const void* scales, int token, long block, unsigned into) {
    if (token < last) {
      const long at = (block * HEADS + head) * BLOCK + token % BLOCK;
      const int8_t* const from = (const int8_t*)pool + at * SIZE;
      if (token >= low && token + TILE <= last) {
        #pragma unroll
        for (int n = 0; n < TILE * PIECES / 32; n++) {
          const int i = n * 32 + lane;
          copy(into + i / PIECES * LINE + i % PIECES * 16, from + i * 16);
        }
      } else {
        #pragma unroll 1
        for (int i = lane; i < TILE * PIECES; i += 32)
          copy(into + i / PIECES * LINE + i % PIECES * 16,
               from + (inside(token + i / PIECES) - token) * SIZE + i % PIECES * 16);
      }
      if (lane < 2) copy(into + SCALES_AT + lane * 16, (const __nv_bfloat16*)scales + at + lane * 8);
    }
    commit_copies();
  };
  const int turned_at = TURNED > 0 ? first_line * (TURNED / 2) : 0;
  auto turned = [&](const N* numbers, long stride, int d) -> float {
    return rotated<N, TURNED, TRADITIONAL>(numbers, stride, d, (const float*)cosines + turned_at,
                                           (const float*)sines + turned_at);
  };
  if (FRESH && first < last && last == high_key) {
    if (warp < 2) {
      constexpr int EACH = SIZE / 32;
      const long at = slot(high_key - 1);
      float numbers[EACH];
      #pragma unroll
      for (int n = 0; n < EACH; n++) {
        const int d = lane * EACH + n;
        N rounded;  // as numbers are that are not quantised
        if (warp == 0)
          down(turned(k_from + first_line * k_line + head * k_head, k_number, d), &rounded);
        else
          rounded = v_from[first_line * v_line + head * v_head + d * v_number];
        numbers[n] = up(rounded);
      }
      store_integers<EACH>(numbers, (int8_t*)(warp == 0 ? keys : values) + at * SIZE,
                           (__nv_bfloat16*)(warp == 0 ? key_scales : value_scales) + at);
    }
    __syncthreads();
  }
  int token = first + warp * TILE;
  if (token + TILE <= low) token += STEP;
  #pragma unroll
  for (int stage = 0; stage < DECODE_STAGES; stage++) {
    const long block = block_of(token + stage * STEP);
    fetch(keys, key_scales, token + stage * STEP, block, base + stage * 2 * MATRIX);
    fetch(values, value_scales, token + stage * STEP, block, base + stage * 2 * MATRIX + MATRIX);
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
        const int at = c * 16 + 4 * quarter + 2 * i;
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
  const char* const key_from = tiles + row * LINE + 4 * quarter;
  const char* const value_from = tiles + MATRIX + 2 * quarter * LINE + 4 * row;
  const char* const scales_from = tiles + SCALES_AT + 4 * quarter;
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
      const unsigned a[4] = {query[0][c][0], SETS > 1 ? query[SETS - 1][c][0] : 0, query[0][c][1],
                             SETS > 1 ? query[SETS - 1][c][1] : 0};
      #pragma unroll
      for (int n = 0; n < 2; n++) {
        const unsigned four = four_integers(key_from + here + n * 8 * LINE + c * 16);
        mma(score[n], a, pair(integer_at(four, 0), integer_at(four, 1), N()),
            pair(integer_at(four, 2), integer_at(four, 3), N()), N());
      }
    }
    #pragma unroll
    for (int n = 0; n < 2; n++) {
      const auto scales = *(const Some<__nv_bfloat16, 2>*)(scales_from + here + n * 16);
      #pragma unroll
      for (int i = 0; i < 4; i++) score[n][i] *= up(scales.n[i % 2]);
    }
    __syncwarp();
    fetch(keys, key_scales, next, block, base + here);
    const bool masked = lines > 1 || token < low || token + TILE > last;
    float shrink[2] = {1, 1};
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
      for (int n = 0; n < 2; n++)
        #pragma unroll
        for (int i = 0; i < 2; i++) {
          float& one = score[n][2 * set + i];
          one = power2(one - less);
          total[set] += one;
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
    unsigned share[4] = {0, 0, 0, 0};
    #pragma unroll
    for (int n = 0; n < 2; n++) {
      const auto scales = *(const Some<__nv_bfloat16, 2>*)(scales_from + MATRIX + here + n * 16);
      float by[2];  // what no line sees may be in memory that was never written
      #pragma unroll
      for (int i = 0; i < 2; i++) {
        const int at = token + n * 8 + 2 * quarter + i;
        by[i] = at < low || at >= last ? 0.f : up(scales.n[i]) * SHARE_SCALE;
      }
      #pragma unroll
      for (int set = 0; set < SETS; set++)
        share[2 * n + set] = pair(score[n][2 * set] * by[0], score[n][2 * set + 1] * by[1], N());
    }
    #pragma unroll
    for (int c = 0; c < SIZE / 32; c++) {
      unsigned four[4];
      #pragma unroll
      for (int n = 0; n < 4; n++) four[n] = four_integers(value_from + here + (n % 2 + n / 2 * 8) * LINE + c * 32);
      #pragma unroll
      for (int j = 0; j < 4; j++)
        mma(sum[4 * c + j], share, pair(integer_at(four[0], j), integer_at(four[1], j), N()),
            pair(integer_at(four[2], j), integer_at(four[3], j), N()), N());
    }
    __syncwarp();
    fetch(values, value_scales, next, block, base + here + MATRIX);
    block = next_block;
    if (DECODE_STAGES > 1) here = here == (DECODE_STAGES - 1) * 2 * MATRIX ? 0 : here + 2 * MATRIX;
  }
  __syncthreads();  // all warps have read their tiles where sums are to be
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
    if (g < asked)
      #pragma unroll
      for (int c = 0; c < SIZE / 32; c++)
        #pragma unroll
        for (int i = 0; i < 2; i++) {
          Some<float, 4> some;
          #pragma unroll
          for (int j = 0; j < 4; j++) some.n[j] = sum[4 * c + j][2 * set + i] / SHARE_SCALE;
          *(Some<float, 4>*)(warp_sum + (warp * ROWS + g) * SIZE + c * 32 + (2 * quarter + i) * 4) = some;
        }
  }
}

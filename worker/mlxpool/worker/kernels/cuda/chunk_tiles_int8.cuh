// As chunk_tiles.cuh, over 8-bit keys and values, with scales and an order of numbers as in
// decode_tiles_int8.cuh.
if (!decodes) {
  // Keys and values come through shared memory, KEYS at a time and one step ahead. Lines of shared
  // memory are an odd number of 16 bytes long, so that eight of them are in different banks.
  constexpr int ROWS = 64 * MATRICES, LINE = SIZE + 16, PIECES = SIZE / 16, QUERY_LINE = (SIZE + 8) * 2;
  constexpr int SCALES_AT = KEYS * LINE, TILE = SCALES_AT + KEYS * 2, STAGE = 2 * TILE;  // bytes
  constexpr bool KEPT = MATRICES * SIZE <= 128;  // queries stay in registers
  constexpr int QUERY_AT = KEPT ? STAGE : 2 * STAGE;  // bytes
  const unsigned base = shared_address(space);
  auto fetch = [&](int token, int stage) {
    if (token < last) {
      const long at = slot(token);
      const unsigned into = base + stage * STAGE;
      auto copy_lines = [&](auto line_of) {
        #pragma unroll
        for (int n = 0; n < (KEYS * PIECES + THREADS - 1) / THREADS; n++) {
          const int i = n * THREADS + threadIdx.x, line = i / PIECES, piece = i % PIECES;
          if (KEYS * PIECES % THREADS == 0 || i < KEYS * PIECES) {
            const long numbers = (at + line_of(line)) * SIZE + piece * 16;
            copy(into + line * LINE + piece * 16, (const int8_t*)keys + numbers);
            copy(into + TILE + line * LINE + piece * 16, (const int8_t*)values + numbers);
          }
        }
      };
      if (token >= low && token + KEYS <= last) {
        copy_lines([](int line) -> int { return line; });
      } else {
        copy_lines([&](int line) -> int { return inside(token + line) - token; });
      }
      if (threadIdx.x < KEYS / 8) {
        const unsigned scales = into + SCALES_AT + threadIdx.x * 16;
        copy(scales, (const __nv_bfloat16*)key_scales + at + threadIdx.x * 8);
        copy(scales + TILE, (const __nv_bfloat16*)value_scales + at + threadIdx.x * 8);
      }
    }
    commit_copies();
  };
  fetch(first, 0);
  #pragma unroll 4
  for (int i = threadIdx.x; i < ROWS * SIZE / 8; i += THREADS) {
    const int g = min(i / (SIZE / 8), asked - 1), piece = i % (SIZE / 8);
    const N* const numbers = query_at(g) + piece * 8 * q_number;
    Some<N, 8> some;
    if (neat) {
      some = *(const Some<N, 8>*)numbers;
    } else {
      #pragma unroll
      for (int n = 0; n < 8; n++) some.n[n] = numbers[n * q_number];
    }
    // Numbers 4 * n and the next of each 16 are in columns 2 * n and the next, the two behind them in
    // columns 8 + 2 * n and the next: a lane has four neighbouring numbers of a key, too.
    char* const to = (char*)space + QUERY_AT + i / (SIZE / 8) * QUERY_LINE + piece / 2 * 32 + piece % 2 * 8;
    *(Some<N, 4>*)to = {some.n[0], some.n[1], some.n[4], some.n[5]};
    *(Some<N, 4>*)(to + 16) = {some.n[2], some.n[3], some.n[6], some.n[7]};
  }
  __syncthreads();
  // The address that a lane gives for the first matrices of queries, and its first integers and scales.
  const unsigned query_from = base + QUERY_AT + (warp * 16 * MATRICES + lane % 16) * QUERY_LINE + lane / 16 * 16;
  const char* const key_from = (const char*)space + row * LINE + 4 * quarter;
  const char* const value_from = (const char*)space + TILE + 2 * quarter * LINE + 4 * row;
  const char* const scales_from = (const char*)space + SCALES_AT + 4 * quarter;
  unsigned query[KEPT ? MATRICES : 1][KEPT ? SIZE / 16 : 1][4];
  if (KEPT)
    #pragma unroll
    for (int m = 0; m < MATRICES; m++)
      #pragma unroll
      for (int c = 0; c < SIZE / 16; c++)
        load_matrices(query[KEPT ? m : 0][KEPT ? c : 0], query_from + m * 16 * QUERY_LINE + c * 32);
  float most[MATRICES][2], total[MATRICES][2], sum[MATRICES][SIZE / 8][4];
  int begin[MATRICES][2], end[MATRICES][2];
  // The keys that some row of the warp sees, and those that all see.
  int warp_low = last, warp_high = 0, all_low = 0, all_high = last;
  #pragma unroll
  for (int m = 0; m < MATRICES; m++) {
    #pragma unroll
    for (int half = 0; half < 2; half++) {
      const int line = min((warp * MATRICES + m) * 16 + row + 8 * half, asked - 1) / GROUP;
      most[m][half] = NONE;
      total[m][half] = 0;
      begin[m][half] = begin_of(line);
      end[m][half] = min(end_of(line), last);
      warp_low = min(warp_low, begin[m][half]);
      warp_high = max(warp_high, end[m][half]);
      all_low = max(all_low, begin[m][half]);
      all_high = min(all_high, end[m][half]);
    }
    #pragma unroll
    for (int j = 0; j < SIZE / 8; j++) sum[m][j][0] = sum[m][j][1] = sum[m][j][2] = sum[m][j][3] = 0;
  }
  #pragma unroll
  for (int other = 4; other < 32; other *= 2) {
    warp_low = min(warp_low, __shfl_xor_sync(0xffffffff, warp_low, other));
    warp_high = max(warp_high, __shfl_xor_sync(0xffffffff, warp_high, other));
    all_low = max(all_low, __shfl_xor_sync(0xffffffff, all_low, other));
    all_high = min(all_high, __shfl_xor_sync(0xffffffff, all_high, other));
  }
  if (warp * 16 * MATRICES >= asked) warp_high = 0;  // no rows
  int stage = 0;
  for (int token = first; token < last; token += KEYS) {
    wait_copies<0>();
    __syncthreads();  // all threads have multiplied what the next keys overwrite
    fetch(token + KEYS, stage ^ 1);
    if (token < warp_high && token + KEYS > warp_low) {
      const unsigned here = stage * STAGE;
      float score[MATRICES][KEYS / 8][4];
      #pragma unroll
      for (int m = 0; m < MATRICES; m++)
        #pragma unroll
        for (int j = 0; j < KEYS / 8; j++)
          score[m][j][0] = score[m][j][1] = score[m][j][2] = score[m][j][3] = 0;
      #pragma unroll
      for (int c = 0; c < SIZE / 16; c++) {
        unsigned a[MATRICES][4];
        #pragma unroll
        for (int m = 0; m < MATRICES; m++)
          if (KEPT) {
            #pragma unroll
            for (int i = 0; i < 4; i++) a[m][i] = query[KEPT ? m : 0][KEPT ? c : 0][i];
          } else {
            load_matrices(a[m], query_from + m * 16 * QUERY_LINE + c * 32);
          }
        #pragma unroll
        for (int j = 0; j < KEYS / 8; j++) {
          const unsigned four = four_integers(key_from + here + j * 8 * LINE + c * 16);
          const unsigned front = pair(integer_at(four, 0), integer_at(four, 1), N());
          const unsigned back = pair(integer_at(four, 2), integer_at(four, 3), N());
          #pragma unroll
          for (int m = 0; m < MATRICES; m++) mma(score[m][j], a[m], front, back, N());
        }
      }
      #pragma unroll
      for (int j = 0; j < KEYS / 8; j++) {
        const auto scales = *(const Some<__nv_bfloat16, 2>*)(scales_from + here + j * 16);
        #pragma unroll
        for (int m = 0; m < MATRICES; m++)
          #pragma unroll
          for (int i = 0; i < 4; i++) score[m][j][i] *= up(scales.n[i % 2]);
      }
      unsigned share[MATRICES][KEYS / 16][4];
      float by[KEYS / 8][2];  // what no row sees may be in memory that was never written
      #pragma unroll
      for (int j = 0; j < KEYS / 8; j++) {
        const auto scales = *(const Some<__nv_bfloat16, 2>*)(scales_from + TILE + here + j * 16);
        #pragma unroll
        for (int i = 0; i < 2; i++) {
          const int at = token + j * 8 + 2 * quarter + i;
          by[j][i] = at < low || at >= last ? 0.f : up(scales.n[i]) * SHARE_SCALE;
        }
      }
      const bool masked = token < all_low || token + KEYS > all_high;
      #pragma unroll
      for (int m = 0; m < MATRICES; m++) {
        if (CAP > 0)
          #pragma unroll
          for (int j = 0; j < KEYS / 8; j++)
            #pragma unroll
            for (int i = 0; i < 4; i++) score[m][j][i] = scored(score[m][j][i]);
        if (masked)
          #pragma unroll
          for (int j = 0; j < KEYS / 8; j++)
            #pragma unroll
            for (int i = 0; i < 4; i++) {
              const int at = token + j * 8 + 2 * quarter + i % 2;
              if (at >= end[m][i / 2] || at < begin[m][i / 2]) score[m][j][i] = NONE;
            }
        #pragma unroll
        for (int half = 0; half < 2; half++) {
          float top = NONE;
          #pragma unroll
          for (int j = 0; j < KEYS / 8; j++)
            top = fmaxf(top, fmaxf(score[m][j][2 * half], score[m][j][2 * half + 1]));
          top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 1));
          top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 2));
          top = fmaxf(most[m][half], top * RATE);
          const float less = top == NONE ? 0.f : top;
          const float shrink = power2(most[m][half] - less);
          most[m][half] = top;
          float all = 0;
          #pragma unroll
          for (int j = 0; j < KEYS / 8; j++) {
            const float left = power2(fmaf(score[m][j][2 * half], RATE, -less));
            const float right = power2(fmaf(score[m][j][2 * half + 1], RATE, -less));
            all += left + right;
            share[m][j / 2][j % 2 * 2 + half] = pair(left * by[j][0], right * by[j][1], N());
          }
          total[m][half] = total[m][half] * shrink + all;
          #pragma unroll
          for (int j = 0; j < SIZE / 8; j++) {
            sum[m][j][2 * half] *= shrink;
            sum[m][j][2 * half + 1] *= shrink;
          }
        }
      }
      #pragma unroll
      for (int t = 0; t < KEYS / 16; t++)
        #pragma unroll
        for (int c = 0; c < SIZE / 32; c++) {
          unsigned four[4];
          #pragma unroll
          for (int n = 0; n < 4; n++)
            four[n] = four_integers(value_from + here + (t * 16 + n % 2 + n / 2 * 8) * LINE + c * 32);
          #pragma unroll
          for (int j = 0; j < 4; j++) {
            const unsigned front = pair(integer_at(four[0], j), integer_at(four[1], j), N());
            const unsigned back = pair(integer_at(four[2], j), integer_at(four[3], j), N());
            #pragma unroll
            for (int m = 0; m < MATRICES; m++) mma(sum[m][4 * c + j], share[m][t], front, back, N());
          }
        }
    }
    stage ^= 1;
  }
  #pragma unroll
  for (int m = 0; m < MATRICES; m++)
    #pragma unroll
    for (int half = 0; half < 2; half++) {
      const int g = (warp * MATRICES + m) * 16 + row + 8 * half;
      float all = total[m][half];
      all += __shfl_xor_sync(0xffffffff, all, 1);
      all += __shfl_xor_sync(0xffffffff, all, 2);
      if (g < asked && !PARTED) {
        const float top = fmaxf(most[m][half], least(g)), weight = power2(most[m][half] - top);
        const float factor = weight / (all * weight + sunk(g, top)) / SHARE_SCALE;
        N* const numbers = output_at(g) + 8 * quarter;
        #pragma unroll
        for (int c = 0; c < SIZE / 32; c++)
          #pragma unroll
          for (int i = 0; i < 2; i++) {
            const int n = 2 * half + i;
            *(uint2*)(numbers + c * 32 + i * 4)
                = {pair(sum[m][4 * c][n] * factor, sum[m][4 * c + 1][n] * factor, N()),
                   pair(sum[m][4 * c + 2][n] * factor, sum[m][4 * c + 3][n] * factor, N())};
          }
      } else if (g < asked) {
        float* const numbers = parts + part * WHOLE + g * SIZE + 8 * quarter;
        #pragma unroll
        for (int c = 0; c < SIZE / 32; c++)
          #pragma unroll
          for (int i = 0; i < 2; i++) {
            Some<float, 4> some;
            #pragma unroll
            for (int j = 0; j < 4; j++) some.n[j] = sum[m][4 * c + j][2 * half + i] / SHARE_SCALE;
            *(Some<float, 4>*)(numbers + c * 32 + i * 4) = some;
          }
        if (quarter == 0) {
          parts[part * WHOLE + QUERIES * SIZE + g] = most[m][half];
          parts[part * WHOLE + QUERIES * SIZE + QUERIES + g] = all;
        }
      }
    }
}

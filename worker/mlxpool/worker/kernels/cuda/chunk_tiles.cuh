// The tiles of chunks: the middle of ragged_attention.cu, after stored_numbers.cuh or stored_integers.cuh.
if (!decodes) {
  // Keys and values come through shared memory, KEYS at a time and one step ahead. Lines of shared
  // memory are an odd number of 16 bytes long, so that eight of them are in different banks.
  constexpr int ROWS = 64 * MATRICES, EACH = 16 / sizeof(Stored), PIECES = SIZE / EACH;  // numbers of 16 bytes
  constexpr int QUERY_LINE = (SIZE + 8) * 2, QUERY_PIECES = SIZE / 8;
  constexpr int SCALES_AT = KEYS * LINE, TILE = SCALES_AT + KEYS * SCALE_BYTES, STAGE = 2 * TILE;  // bytes
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
            const long numbers = at * SIZE + line_of(line) * SIZE + piece * EACH;
            copy(into + line * LINE + piece * 16, (const Stored*)keys + numbers);
            copy(into + TILE + line * LINE + piece * 16, (const Stored*)values + numbers);
          }
        }
      };
      if (token >= low && token + KEYS <= last) {
        copy_lines([](int line) -> int { return line; });
      } else {
        copy_lines([&](int line) -> int { return inside(token + line) - token; });
      }
      if (threadIdx.x < KEYS / 8) copy_scales(into + SCALES_AT, into + TILE + SCALES_AT, at, threadIdx.x);
    }
    commit_copies();
  };
  fetch(first, 0);
  #pragma unroll 4
  for (int i = threadIdx.x; i < ROWS * QUERY_PIECES; i += THREADS) {
    const int g = min(i / QUERY_PIECES, asked - 1), piece = i % QUERY_PIECES;
    const N* const numbers = query_at(g) + piece * 8 * q_number;
    Some<N, 8> some;
    if (neat) {
      some = *(const Some<N, 8>*)numbers;
    } else {
      #pragma unroll
      for (int n = 0; n < 8; n++) some.n[n] = numbers[n * q_number];
    }
    put_query((char*)space + QUERY_AT + i / QUERY_PIECES * QUERY_LINE, piece, some);
  }
  __syncthreads();
  // The address that a lane gives for the first matrices of queries.
  const unsigned query_from
      = base + QUERY_AT + (warp * 16 * MATRICES + lane % 16) * QUERY_LINE + lane / 16 * 16;
  unsigned query[KEPT ? MATRICES : 1][KEPT ? SIZE / 16 : 1][4];
  if (KEPT)
    #pragma unroll
    for (int m = 0; m < MATRICES; m++)
      #pragma unroll
      for (int c = 0; c < SIZE / 16; c++)
        load_matrices(query[KEPT ? m : 0][KEPT ? c : 0], query_from + m * 16 * QUERY_LINE + c * 32);
  float most[MATRICES][2], total[MATRICES][2], sum[MATRICES][SIZE / 8][4];
  int begin[MATRICES][2], end[MATRICES][2];
  // The keys that some row of the warp sees, and the keys that all its rows see.
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
    __syncthreads();  // all threads have multiplied the keys that the next ones overwrite
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
        for (int j = 0; j < KEYS / 16; j++) {
          unsigned b[4];
          load_keys(b, here + j * 16 * LINE + c * 16 * sizeof(Stored));
          #pragma unroll
          for (int m = 0; m < MATRICES; m++) {
            mma(score[m][2 * j], a[m], b[0], b[1], N());
            mma(score[m][2 * j + 1], a[m], b[2], b[3], N());
          }
        }
      }
      Scales by[KEYS / 8];
      #pragma unroll
      for (int j = 0; j < KEYS / 8; j++) {
        by[j] = scales_of(here + SCALES_AT + j * 16, here + TILE + SCALES_AT + j * 16, token + j * 8);
        #pragma unroll
        for (int m = 0; m < MATRICES; m++) scale_scores(score[m][j], by[j]);
      }
      unsigned share[MATRICES][KEYS / 16][4];
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
            share[m][j / 2][j % 2 * 2 + half] = share_pair(left, right, by[j]);
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
        for (int c = 0; c < PIECES / 2; c++) {
          unsigned b[2 * VALUE_MATRICES];
          load_values(b, here + TILE + t * 16 * LINE + c * 32);
          #pragma unroll
          for (int m = 0; m < MATRICES; m++)
            #pragma unroll
            for (int j = 0; j < VALUE_MATRICES; j++)
              mma(sum[m][VALUE_MATRICES * c + j], share[m][t], b[2 * j], b[2 * j + 1], N());
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
        const float factor = weight / (all * weight + sunk(g, top));
        put_output(output_at(g), sum[m], half, factor);
      } else if (g < asked) {
        put_sums(parts + part * WHOLE + g * SIZE, sum[m], half);
        if (quarter == 0) {
          parts[part * WHOLE + QUERIES * SIZE + g] = most[m][half];
          parts[part * WHOLE + QUERIES * SIZE + QUERIES + g] = all;
        }
      }
    }
}

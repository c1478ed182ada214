// The tiles of chunks in the tensor cores of Hopper: the middle of ragged_attention.cu. Each of two groups of
// four warps has 64 rows; both share keys and values, which are copied one step ahead. All matrices are in
// the layout of the tensor cores: 64 numbers of a line are 128 bytes, whose 16-byte pieces are swizzled
// differently in each of eight lines; further numbers are in the next matrix.
if (!decodes) {
  constexpr int ROWS = 16 * WARPS, PIECES = SIZE / 8;
  constexpr int TILE = KEYS * SIZE * 2, STAGE = 2 * TILE, QUERY_AT = 2 * STAGE;  // bytes
  const unsigned base = (shared_address(space) + 1023) & ~1023u;
  auto swizzled = [](int line, int piece, int lines) -> unsigned {
    return piece / 8 * lines * 128 + line * 128 + ((piece ^ line) & 7) * 16;
  };
  auto fetch = [&](int token, int stage) {
    if (token < last) {
      const unsigned into = base + stage * STAGE;
      constexpr int COPIES = KEYS * PIECES / THREADS, LINES_APART = THREADS / PIECES;  // LINES_APART is a multiple of 8
      const int line = threadIdx.x / PIECES, piece = threadIdx.x % PIECES;
      const long at = place(token) + piece * 8;
      const N *const key = (const N*)keys + at, *const value = (const N*)values + at;
      const unsigned to = into + swizzled(line, piece, KEYS);
      auto copy_lines = [&](auto line_of) {
        #pragma unroll
        for (int n = 0; n < COPIES; n++) {
          const int number = line_of(line + n * LINES_APART) * SIZE;
          copy(to + n * LINES_APART * 128, key + number);
          copy(to + TILE + n * LINES_APART * 128, value + number);
        }
      };
      if (token >= low && token + KEYS <= last) copy_lines([](int line) { return line; });
      else copy_lines([&](int line) { return inside(token + line) - token; });
    }
    commit_copies();
  };
  fetch(first, 0);
  #pragma unroll 4
  for (int i = threadIdx.x; i < ROWS * PIECES; i += THREADS) {
    const int g = min(i / PIECES, asked - 1), piece = i % PIECES;
    const N* const numbers = query_at(g) + piece * 8 * q_number;
    Some<N, 8> some;
    if (neat) {
      some = *(const Some<N, 8>*)numbers;
    } else {
      #pragma unroll
      for (int n = 0; n < 8; n++) some.n[n] = numbers[n * q_number];
    }
    const unsigned to = base - shared_address(space) + QUERY_AT + swizzled(i / PIECES, piece, ROWS);
    *(Some<N, 8>*)((char*)space + to) = some;
  }
  // The keys that some row of the group sees, and the keys that all its rows see. The last of neighbouring lines
  // sees the last keys.
  const int group = warp / 4;
  const int head_line = min(group * 64, asked - 1) / GROUP, tail_line = min(group * 64 + 63, asked - 1) / GROUP;
  const int group_low = begin_of(head_line), all_low = begin_of(tail_line);
  const int group_high = group * 64 < asked ? min(end_of(tail_line), last) : 0;
  const int all_high = min(end_of(head_line), last);
  float most[2], total[2], sum[SIZE / 2];
  int begin[2], end[2];
  #pragma unroll
  for (int half = 0; half < 2; half++) {
    const int line = min(warp * 16 + row + 8 * half, asked - 1) / GROUP;
    most[half] = NONE;
    total[half] = 0;
    begin[half] = begin_of(line);
    end[half] = min(end_of(line), last);
  }
  #pragma unroll
  for (int i = 0; i < SIZE / 2; i++) sum[i] = 0;
  const unsigned query_from = base + QUERY_AT + group * 64 * 128;
  int stage = 0;
  #pragma unroll 1
  for (int token = first; token < last; token += KEYS) {
    wait_copies<0>();
    fence_products();
    __syncthreads();  // all groups have multiplied the keys that the next ones overwrite
    fetch(token + KEYS, stage ^ 1);
    if (token < group_high && token + KEYS > group_low) {
      const unsigned here = base + stage * STAGE;
      float score[KEYS / 2];
      #pragma unroll
      for (int i = 0; i < KEYS / 2; i++) score[i] = 0;
      hold(score);
      begin_products();
      #pragma unroll
      for (int c = 0; c < SIZE / 16; c++)
        group_mma(score, matrix_at(query_from + c / 4 * ROWS * 128, 64) + c % 4 * 2,
                  matrix_at(here + c / 4 * KEYS * 128, 64) + c % 4 * 2);
      commit_products();
      wait_products<0>();
      hold(score);
      if (CAP > 0)
        #pragma unroll
        for (int i = 0; i < KEYS / 2; i++) score[i] = scored(score[i]);
      if (token < all_low || token + KEYS > all_high)
        #pragma unroll
        for (int i = 0; i < KEYS / 2; i++) {
          const int at = token + i / 4 * 8 + 2 * quarter + i % 2;
          if (at >= end[i / 2 % 2] || at < begin[i / 2 % 2]) score[i] = NONE;
        }
      unsigned share[KEYS / 16][4];
      float shrink[2];
      #pragma unroll
      for (int half = 0; half < 2; half++) {
        float top = NONE;
        #pragma unroll
        for (int j = 2 * half; j < KEYS / 2; j += 4) top = fmaxf(top, fmaxf(score[j], score[j + 1]));
        top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 2));
        top = fmaxf(most[half], top * RATE);
        const float less = top == NONE ? 0.f : top;
        shrink[half] = power2(most[half] - less);
        most[half] = top;
        float all = 0;
        #pragma unroll
        for (int j = 0; j < KEYS / 8; j++) {
          const float left = power2(fmaf(score[4 * j + 2 * half], RATE, -less));
          const float right = power2(fmaf(score[4 * j + 2 * half + 1], RATE, -less));
          all += left + right;
          share[j / 2][j % 2 * 2 + half] = pair(left, right, N());
        }
        total[half] = total[half] * shrink[half] + all;
      }
      if (shrink[0] != 1 || shrink[1] != 1)  // seldom, after some keys
        #pragma unroll
        for (int i = 0; i < SIZE / 2; i++) sum[i] *= shrink[i / 2 % 2];
      __syncwarp();
      hold(sum);
      begin_products();
      #pragma unroll
      for (int t = 0; t < KEYS / 16; t++)
        group_mma_values(sum, share[t][0], share[t][1], share[t][2], share[t][3],
                         matrix_at(here + TILE + t * 16 * 128, KEYS * 8));
      commit_products();
      wait_products<0>();
      hold(sum);
    }
    stage ^= 1;
  }
  #pragma unroll
  for (int half = 0; half < 2; half++) {
    const int g = warp * 16 + row + 8 * half;
    float all = total[half];
    all += __shfl_xor_sync(0xffffffff, all, 1);
    all += __shfl_xor_sync(0xffffffff, all, 2);
    if (g < asked && !PARTED) {
      const float top = fmaxf(most[half], least(g)), weight = power2(most[half] - top);
      const float factor = weight / (all * weight + sunk(g, top));
      N* const numbers = output_at(g) + 2 * quarter;
      #pragma unroll
      for (int j = 0; j < SIZE / 8; j++) {
        const float* const two = &sum[j * 4 + 2 * half];
        *(unsigned*)(numbers + 8 * j) = pair(two[0] * factor, two[1] * factor, N());
      }
    } else if (g < asked) {
      float* const numbers = parts + part * WHOLE + g * SIZE + 2 * quarter;
      #pragma unroll
      for (int j = 0; j < SIZE / 8; j++) {
        const float* const two = &sum[j * 4 + 2 * half];
        *(Some<float, 2>*)(numbers + 8 * j) = {two[0], two[1]};
      }
      if (quarter == 0) {
        parts[part * WHOLE + QUERIES * SIZE + g] = most[half];
        parts[part * WHOLE + QUERIES * SIZE + QUERIES + g] = all;
      }
    }
  }
}

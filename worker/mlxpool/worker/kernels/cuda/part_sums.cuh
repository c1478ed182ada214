// The end of ragged_attention.cu, and of an item of decode_pass.cu. Its THREADS share `before`, `sync` waits for them,
// and `thread` is this thread's number. A part of a row has stored NUMBERS sums for each of QUERIES, then the greatest
// score of each, then the total of each. The part that finishes last adds up all parts and resets the counter. `to`
// returns the address of a result; null: unused. A thread has at most MOST_PAIRS pairs of sums of a part.
if (PARTED) {
  __threadfence();
  sync();
  if (thread == 0) before = atomicAdd((int*)arrived + mine, 1);
  sync();
  if (before == count - 1) {
    __threadfence();
    // A thread adds up some pairs of numbers at a time: their loads wait for memory together.
    constexpr int PAIRS = MOST_PAIRS > 4 ? 4 : MOST_PAIRS;
    const int all_numbers = QUERIES * NUMBERS;
    #pragma unroll 1
    for (int from = 2 * thread; from < all_numbers; from += 2 * PAIRS * THREADS) {
      int at[PAIRS], g[PAIRS];
      float top[PAIRS], all[PAIRS], left[PAIRS], right[PAIRS];
      #pragma unroll
      for (int n = 0; n < PAIRS; n++) {
        at[n] = min(from + 2 * n * THREADS, all_numbers - 2);
        g[n] = at[n] / NUMBERS;
        top[n] = least(g[n]);
        all[n] = left[n] = right[n] = 0;
      }
      #pragma unroll 2
      for (int p = 0; p < count; p++) {
        const float* const of_part = parts + p * WHOLE;
        #pragma unroll
        for (int n = 0; n < PAIRS; n++) {
          const float2 two = __ldcg((const float2*)(of_part + at[n]));
          const float most = __ldcg(of_part + all_numbers + g[n]);
          const float total = __ldcg(of_part + all_numbers + QUERIES + g[n]);
          const float higher = fmaxf(top[n], most), shrink = exp2f(top[n] - higher), weight = exp2f(most - higher);
          left[n] = left[n] * shrink + two.x * weight;
          right[n] = right[n] * shrink + two.y * weight;
          all[n] = all[n] * shrink + total * weight;
          top[n] = higher;
        }
      }
      #pragma unroll
      for (int n = 0; n < PAIRS; n++) {
        N* const place = from + 2 * n * THREADS < all_numbers ? to(at[n]) : nullptr;
        if (!place) continue;
        const float sum = all[n] + sunk(g[n], top[n]);
        down(left[n] / sum, place);
        down(right[n] / sum, place + 1);
      }
    }
    if (thread == 0) ((int*)arrived)[mine] = 0;
  }
}

// The end of paged_attention.cu, ragged_attention.cu and latent_attention.cu, and of an item of
// decode_pass.cu. Its THREADS, of which `thread` is the number of one, share `before`, and `sync` waits for
// them. A part of a row has stored NUMBERS sums for each of QUERIES, then the greatest score of each, then
// the total of each. The part that finishes last adds up all parts and resets the counter. `to` returns the
// address of a result; null: unused.
if (PARTED) {
  __threadfence();
  sync();
  if (thread == 0) before = atomicAdd((int*)arrived + mine, 1);
  sync();
  if (before == count - 1) {
    __threadfence();
    #pragma unroll 1
    for (int i = thread; i < QUERIES * NUMBERS; i += THREADS) {
      const int g = i / NUMBERS;
      N* const place = to(i);
      if (!place) break;
      float top = least(g);
      #pragma unroll 8
      for (int p = 0; p < count; p++)
        top = fmaxf(top, __ldcg(parts + p * WHOLE + QUERIES * NUMBERS + g));
      float numbers = 0, all = 0;
      #pragma unroll 8
      for (int p = 0; p < count; p++) {
        const float weight = exp2f(__ldcg(parts + p * WHOLE + QUERIES * NUMBERS + g) - top);
        numbers += weight * __ldcg(parts + p * WHOLE + i);
        all += weight * __ldcg(parts + p * WHOLE + QUERIES * NUMBERS + QUERIES + g);
      }
      down(numbers / (all + sunk(g, top)), place);
    }
    if (thread == 0) ((int*)arrived)[mine] = 0;
  }
}

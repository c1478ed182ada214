// Adds up the warps' sums of a tile of lines that decode: the third part of ragged_attention.cu, after
// decode_tiles.cuh.
if (decodes) {
  constexpr int ROWS = DECODE_ROWS;
  const float* const warp_most = (const float*)space;  // [WARPS][ROWS]: the greatest scores
  const float* const warp_total = warp_most + WARPS * ROWS;  // [WARPS][ROWS]
  const float* const warp_sum = warp_total + WARPS * ROWS;  // [WARPS][ROWS][SIZE]
  sync();
  #pragma unroll 1
  for (int i = thread; i < asked * SIZE; i += THREADS) {
    const int g = i / SIZE, d = i % SIZE;
    float top = PARTED ? -1e30f : least(g);
    #pragma unroll
    for (int w = 0; w < WARPS; w++) top = fmaxf(top, warp_most[w * ROWS + g]);
    float numbers = 0, all = 0;
    #pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float weight = power2(warp_most[w * ROWS + g] - top);
      numbers += weight * warp_sum[(w * ROWS + g) * SIZE + d];
      all += weight * warp_total[w * ROWS + g];
    }
    if (!PARTED) {
      down(numbers / (all + sunk(g, top)), to(i));
    } else {
      parts[part * WHOLE + i] = numbers;
      if (d == 0) {
        parts[part * WHOLE + QUERIES * SIZE + g] = top;
        parts[part * WHOLE + QUERIES * SIZE + QUERIES + g] = all;
      }
    }
  }
}

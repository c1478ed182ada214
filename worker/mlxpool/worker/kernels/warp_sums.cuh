// The end of product.cu and packed.cu: what the warps of a thread block found is added up and goes out,
// EACH numbers of a line.
__syncthreads();
constexpr int WHOLE = SETS * 8 + 1;
float* const found = (float*)space;  // [WARPS][TILES * 16][WHOLE]
#pragma unroll
for (int tile = 0; tile < TILES; tile++)
  #pragma unroll
  for (int set = 0; set < SETS; set++)
    #pragma unroll
    for (int i = 0; i < 4; i++)
      found[((warp * TILES + tile) * 16 + line + i / 2 * 8) * WHOLE + set * 8 + quarter * 2 + i % 2]
          = sum[tile][set][i];
__syncthreads();
for (int i = threadIdx.x; i < LINES * EACH; i += THREADS) {
  const int row = i % EACH, l = i / EACH;
  float one = 0, other = 0;
  #pragma unroll
  for (int w = 0; w < WARPS; w++) {
    one += found[(w * TILES * 16 + row) * WHOLE + l];
    if (GATED) other += found[(w * TILES * 16 + EACH + row) * WHOLE + l];
  }
  down(GATED ? gated(one, other, N()) : one, (N*)out + (long)l * OUT + first + row);
}

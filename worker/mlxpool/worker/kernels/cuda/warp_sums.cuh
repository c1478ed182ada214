// The end of products of few lines: adds up the sums of the warps of a thread block in shared memory, `found`,
// and writes EACH results of a line. NORMED: also divides by the RMS, from the warps' sums of squares.
// BIASED: `bias` [rows of the weight] is added to the sums. ADDED: `beside` is added last. A lane has the sums of
// LANE_LINES lines, `quarter` * LANE_LINES and so on, of two rows, and a part of the squares of line `line`.
__syncthreads();
constexpr int WHOLE = HELD_LINES + 1;  // found [WARPS][TILES * 16][WHOLE]
float* const lengths = found + WARPS * TILES * 16 * WHOLE;  // [WARPS][HELD_LINES]
#pragma unroll
for (int tile = 0; tile < TILES; tile++)
  #pragma unroll
  for (int set = 0; set < SETS; set++)
    #pragma unroll
    for (int i = 0; i < 2 * LANE_LINES; i++)
      if (quarter * LANE_LINES < HELD_LINES)
        found[((warp * TILES + tile) * 16 + line + i / LANE_LINES * 8) * WHOLE + set * 8 + quarter * LANE_LINES
              + i % LANE_LINES] = sum[tile][set][i];
#pragma unroll
for (int set = 0; set < SETS; set++)
  if (NORMED) {
    float squares_of = squares[set];
    squares_of += __shfl_xor_sync(0xffffffff, squares_of, 1);
    squares_of += __shfl_xor_sync(0xffffffff, squares_of, 2);
    if (quarter == 0 && line < HELD_LINES) lengths[warp * HELD_LINES + set * 8 + line] = squares_of;
  }
__syncthreads();
#pragma unroll 1
for (int i = threadIdx.x; i < LINES * EACH; i += THREADS) {
  const int row = i % EACH, l = i / EACH;
  const long to = (long)l * OUT + first + row;
  float one = 0, other = 0, length = 0;
  #pragma unroll
  for (int w = 0; w < WARPS; w++) {
    one += found[(w * TILES * 16 + row) * WHOLE + l];
    if (GATED) other += found[(w * TILES * 16 + EACH + row) * WHOLE + l];
    if (NORMED) length += lengths[w * HELD_LINES + l];
  }
  if (NORMED) {
    const float factor = rsqrtf(length / IN + EPS);
    one *= factor;
    other *= factor;
  }
  one = result_of<GATED, BIASED>(one, other, (const N*)bias, first + row, OUT);
  if (ADDED) {
    N rounded;
    down(one, &rounded);
    one = up(rounded) + up(((const N*)beside)[to]);
  }
  down(one, (N*)out + to);
}

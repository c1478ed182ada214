// The queries, the key and the value of a line for one key head, a part of decode_pass.cu, which defines `layer`. Each
// team sums them up in its shared memory `fresh` [GROUP + 2][SIZE]: GROUP queries, then the key, then the value.
constexpr int THREADS = 128, WARPS = 4;  // of a team
const int team = threadIdx.x / THREADS, thread = threadIdx.x % THREADS, lane = thread & 31, warp = thread >> 5;
N* const fresh = fresh_lines + team * (GROUP + 2) * SIZE;
N* const keys = layer.keys;
N* const values = layer.values;
auto sync = [&] { sync_team<THREADS>(1 + team); };
// Sums up the parts of the product from row `from` of `fresh` on, rounds as products do, and norms queries and key. With
// `from` = GROUP it skips the queries.
auto sum_line = [&](int line, int head, int from) {
  for (int i = from * SIZE / 8 + thread; i < (GROUP + 2) * SIZE / 8; i += THREADS) {
    const int kind = i / (SIZE / 8), piece = i % (SIZE / 8);
    const int source = kind < GROUP ? head * GROUP + kind : (GROUP + kind - GROUP) * HEADS + head;
    const int column = source * SIZE + piece * 8;
    float sum[8];
    sum_parts(sum, QKV_SPLITS, line, column, QKV);
    #pragma unroll
    for (int e = 0; e < 8; e++) {
      if (BIASED) sum[e] += up(layer.bias[column + e]);
      down(sum[e], fresh + i * 8 + e);
    }
  }
  sync();
  if (!HEAD_NORMS) return;
  for (int one = from + warp; one <= GROUP; one += WARPS) {
    const N* const gain = one < GROUP ? layer.query_norm : layer.key_norm;
    float squares = 0;
    for (int d = lane; d < SIZE; d += 32) squares += up(fresh[one * SIZE + d]) * up(fresh[one * SIZE + d]);
    #pragma unroll
    for (int o = 16; o > 0; o >>= 1) squares += __shfl_xor_sync(0xffffffff, squares, o);
    const float factor = rsqrtf(squares / SIZE + HEAD_EPS);
    for (int d = lane; d < SIZE; d += 32) {
      N rounded;
      down(up(fresh[one * SIZE + d]) * factor, &rounded);
      down(up(rounded) * up(gain[d]), fresh + one * SIZE + d);
    }
  }
  sync();
};
// Writes keys and values of all lines to their slots.
auto write_lines = [&] {
  const int* const slots = (const int*)numbers + 2 * LINES;
  #pragma unroll 1
  for (int n = team * gridDim.x + blockIdx.x; n < LINES * HEADS; n += TEAMS * gridDim.x) {
    const int line = n / HEADS, head = n % HEADS, slot = slots[line];
    if (slot < 0) continue;  // padding
    sum_line(line, head, GROUP);
    const long at = (((long)(slot / BLOCK) * HEADS + head) * BLOCK + slot % BLOCK) * SIZE;
    const N* const key = fresh + GROUP * SIZE;
    #pragma unroll 1
    for (int d = thread; d < SIZE; d += THREADS) {
      down(rotated<N, TURNED, TRADITIONAL>(key, 1, d, (const float*)cosines + line * HALF, (const float*)sines + line * HALF),
           keys + at + d);
      values[at + d] = key[SIZE + d];
    }
    sync();  // all threads have read the line that the next one overwrites
  }
};

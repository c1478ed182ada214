// The attention of a layer, a part of decode_pass.cu. Each of TEAMS teams of four warps has an item of the work list,
// which is a line and a part of its keys, and one key head. The tiles are those of ragged_attention.cu.
{
  constexpr float LOG2E = 1.4426950408889634f, RATE = SCALE * LOG2E;
  constexpr bool FRESH = true, decodes = true;
  const bool STORES = !writes;  // the key and value of a line
  constexpr int TEAM_BYTES = WARPS * DECODE_STAGES * 2 * 16 * (SIZE * 2 + 16);  // of shared memory
  const float NONE = __uint_as_float(0xff800000);  // -infinity
  const int row = lane >> 2, quarter = lane & 3;
  uint4* const space = (uint4*)(ring + team * TEAM_BYTES);
  int& before = befores[team];
  #pragma unroll 1
  for (int n = team * gridDim.x + blockIdx.x;; n += TEAMS * gridDim.x) {
    const Item item = item_of(n, layer);
    if (item.lines == 0) break;
    const int first_line = item.line, head = item.head, count = item.count;
    N* const output = (N*)attended + ((long)first_line * HEADS + head) * GROUP * SIZE;
    if (count == 0) {  // padding
      constexpr int PIECES = GROUP * SIZE / 8;
      for (int i = thread; i < item.lines * PIECES; i += THREADS)
        ((uint4*)(output + (long)(i / PIECES) * QUERIES_WIDTH))[i % PIECES] = uint4{0, 0, 0, 0};
      continue;
    }
    sum_line(first_line, head, 0);
    // decode_tiles.cuh and the files after it read these names.
    const int asked = GROUP, lines = 1, table_at = item.table, part = item.part, unit = item.unit;
    const int low = item.low, high_key = item.high, first = item.first, last = item.last;
    auto begin_of = [&](int line) -> int { return low; };
    auto end_of = [&](int line) -> int { return high_key; };
    auto slot = [&](int token) -> long { return slot_of(item, token); };
    auto inside = [&](int token) -> int { return min(max(token, low), last - 1); };
    const N* const k_from = fresh + GROUP * SIZE;
    const N* const v_from = fresh + (GROUP + 1) * SIZE;
    const long k_line = 0, k_head = 0, v_line = 0, v_head = 0, q_number = 1, k_number = 1, v_number = 1;
    auto query_at = [&](int row) -> const N* { return fresh + row * SIZE; };
    const bool neat = true;
    auto scored = [&](float product) -> float { return product; };
    auto sunk = [&](int row, float top) -> float { return 1e-30f; };
    auto least = [&](int row) -> float { return -1e30f; };
    const bool PARTED = count > 1;
    const int QUERIES = asked, WHOLE = DECODE_ROWS * (SIZE + 2);
    constexpr int NUMBERS = SIZE, MOST_PAIRS = (GROUP * SIZE / 2 + THREADS - 1) / THREADS;
    const long mine = (long)head * UNITS + unit;
    float* const parts = (float*)sums + mine * UNIT_ROWS * (SIZE + 2);
    auto to = [&](int i) -> N* { return output + i; };
    #include STORED_NUMBERS
    #include DECODE_TILES
    #include DECODE_SUMS
    #include PART_SUMS
  }
}

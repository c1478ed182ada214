// Attention of a step's lines over a block pool. A thread block has an item of the work list, which is
// a tile of neighbouring lines of one row, and one key head. The query heads of the key head, line by
// line, are the rows of the tile. A tile of up to DECODE_ROWS rows reads keys and values into registers,
// and each warp has other keys (decode_tiles.cuh). A larger tile shares keys and values, and each warp
// has other rows (chunk_tiles.cuh). stored_numbers.cuh or stored_integers.cuh reads and writes stored keys
// and values for both. The keys of a tile may be divided into parts, which part_sums.cuh adds up. Scores are
// of base 2.
constexpr int THREADS = WARPS * 32;
constexpr float LOG2E = 1.4426950408889634f;
constexpr float RATE = CAP > 0 ? 1.f : SCALE * LOG2E;  // of the numbers that `scored` returns
const float NONE = __uint_as_float(0xff800000);  // -infinity
constexpr bool STORES = true;  // the fresh key and value of a line
extern __shared__ uint4 space[];
__shared__ int before;  // see part_sums.cuh
const int thread = threadIdx.x;
auto sync = [] { __syncthreads(); };

const int head = blockIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
const int row = lane >> 2, quarter = lane & 3;  // of a matrix
const int* const item = (const int*)items + 8 * blockIdx.y;
const int first_line = item[0], lines = item[1], table_at = item[2], low_key = item[3];
const int high_key = item[4], part = item[5], count = item[6], unit = item[7];
if (lines == 0) return;
if (count == 0) {  // padding
  constexpr int PIECES = GROUP * SIZE / 8;
  for (int i = threadIdx.x; i < lines * PIECES; i += THREADS)
    *((uint4*)((N*)out + ((long)(first_line + i / PIECES) * HEADS + head) * GROUP * SIZE) + i % PIECES)
        = uint4{0, 0, 0, 0};
  return;
}
const int asked = lines * GROUP;
const bool decodes = asked <= DECODE_ROWS;
// The keys that a line sees.
auto begin_of = [&](int line) -> int {
  const int from = lines == 1 ? low_key : begins[first_line + line];
  return WINDOW > 0 ? max(from, (lines == 1 ? high_key : ends[first_line + line]) - WINDOW) : from;
};
auto end_of = [&](int line) -> int { return lines == 1 ? high_key : ends[first_line + line]; };
// The keys that some line sees, and those of this part.
int low = low_key;
if (WINDOW > 0) {
  low = high_key;
  for (int line = lane; line < lines; line += 32) low = min(low, begin_of(line));
  #pragma unroll
  for (int other = 1; other < 32; other *= 2) low = min(low, __shfl_xor_sync(0xffffffff, low, other));
}
constexpr int STEP = 16 * WARPS;  // keys that all warps of a decode tile read at a time
const int from = low / STEP * STEP;
const int each = count == 1 ? high_key - from : ((high_key - from + count - 1) / count + STEP - 1) / STEP * STEP;
const int first = from + part * each, last = min(high_key, first + each);
auto slot = [&](int token) -> long {
  const long block = tables[table_at + token / BLOCK];
  return (block * HEADS + head) * BLOCK + token % BLOCK;
};
auto place = [&](int token) -> long { return slot(token) * SIZE; };
// A key of the part, since others may be in memory that was never written.
auto inside = [&](int token) -> int { return min(max(token, low), last - 1); };
// Queries, keys and values have their own strides, or are PACKED one after the other in each line.
constexpr long WIDTH = (GROUP + 2) * HEADS * SIZE;
const N* const k_from = (const N*)k + (PACKED ? GROUP * HEADS * SIZE : 0);
const N* const v_from = (const N*)v + (PACKED ? (GROUP + 1) * HEADS * SIZE : 0);
const long q_line = PACKED ? WIDTH : q_strides[0], q_head = PACKED ? SIZE : q_strides[1];
const long k_line = PACKED ? WIDTH : k_strides[0], k_head = PACKED ? SIZE : k_strides[1];
const long v_line = PACKED ? WIDTH : v_strides[0], v_head = PACKED ? SIZE : v_strides[1];
const long q_number = PACKED ? 1 : q_strides[2], k_number = PACKED ? 1 : k_strides[2];
const long v_number = PACKED ? 1 : v_strides[2];
auto query_at = [&](int row) -> const N* {
  return (const N*)q + (first_line + row / GROUP) * q_line + (head * GROUP + row % GROUP) * q_head;
};
const bool neat = q_number == 1 && (q_line | q_head) % 8 == 0 && (unsigned long long)q % 16 == 0;
auto scored = [&](float product) -> float {
  if (!(CAP > 0)) return product;
  return LOG2E * CAP * (1 - 2 / (1 + power2(product * (2 * LOG2E * SCALE / (CAP > 0 ? CAP : 1)))));
};
auto sink_of = [&](int row) -> float { return up(sinks[head * GROUP + row % GROUP]) * LOG2E; };
auto sunk = [&](int row, float top) -> float { return SINKS ? power2(sink_of(row) - top) : 1e-30f; };
auto least = [&](int row) -> float { return SINKS ? sink_of(row) : -1e30f; };
auto output_at = [&](int row) -> N* {
  return (N*)out + (((long)first_line + row / GROUP) * HEADS * GROUP + head * GROUP + row % GROUP) * SIZE;
};
const bool PARTED = count > 1;
const int QUERIES = asked, WHOLE = (decodes ? DECODE_UNITS : TILE_UNITS) * UNIT_ROWS * (SIZE + 2);
// part_sums.cuh reads these names.
constexpr int NUMBERS = SIZE, MOST_PAIRS = ((FRESH ? DECODE_UNITS : TILE_UNITS) * UNIT_ROWS * SIZE / 2 + THREADS - 1) / THREADS;
const long mine = (long)head * UNITS + unit;
float* const parts = (float*)partial + mine * UNIT_ROWS * (SIZE + 2);
auto to = [&](int i) -> N* { return output_at(i / SIZE) + i % SIZE; };

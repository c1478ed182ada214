// The beginning of expert_product.cu and expert_product_packed.cu: what a thread block multiplies.
// Products of lines with the weights [EXPERTS, _, IN] of the experts that they have chosen, by the items of
// `plan` (expert_routing.cu): x [LINES, IN] -> out [choices by expert, OUT], the activation of gate and up,
// where GATED; otherwise x [choices by expert, IN] -> out [choices, OUT]. SHARED: every line is also an
// item's, of the expert EXPERTS. A thread block takes items' tiles of 128 rows in turn, each with all lines
// of an item, which are up to 8 * SETS. A gated tile alternates eight gates with the eight others that belong
// to them, so that a thread has the sums of both.
constexpr int ROWS = 128, ALL = 8 * SETS, THREADS = 256;
constexpr int EACH = GATED ? ROWS / 2 : ROWS;  // results of a tile for a line
const int OUT = weight_shape[1] / (GATED ? 2 : 1);
const int lines = x_shape[0] / (GATED ? 1 : CHOSEN + SHARED), choices = lines * CHOSEN;
const int tiles = (OUT + EACH - 1) / EACH;
const int* const sorted = (const int*)plan + 4 + 2 * choices;
const int* const items = (const int*)plan + (5 + 3 * choices + SHARED * lines) / 2 * 2;
const int units = *(const int*)plan * tiles;  // tiles of items; this block has each gridDim.x-th
const int thread = threadIdx.x;
extern __shared__ uint4 space[];
__shared__ int targets[2][ALL];  // rows of `out`, of this unit and the one before
const unsigned base = (shared_address(space) + 1023) & ~1023u;
// The row of an expert's weight that is row `at` of a tile; rows behind the last one are like it.
auto row_of = [&](int unit, int at) -> int {
  const int first = unit % tiles * EACH;
  if (!GATED) return min(first + at, OUT - 1);
  return min(first + at / 16 * 8 + at % 8, OUT - 1) + (at % 16 >= 8 ? OUT : 0);
};
// The row of x that is a line of an item.
auto source_of = [&](const int* item, int line) -> int {
  const int choice = GATED ? sorted[item[1] + line] : item[1] + line;
  return !GATED ? choice : choice < choices ? choice / CHOSEN : choice - choices;
};
// Notes the rows of `out` of an item's lines, before any barrier ahead of its results.
auto note_targets = [&](const int* item, int parity) {
  if (thread < item[0] >> 16)
    targets[parity][thread] = GATED ? item[1] + thread : sorted[item[1] + thread];
};
// Where number `at` of a result is written. OUT_ORDERED: in the order in which expert_product_packed.cu multiplies:
// a thread has 16 neighbours of 64 columns, as pairs (0, 4), (1, 5) and so on of eight. All first pairs of the four
// threads are neighbours, then all second ones.
auto place_of = [](int at) -> int {
  return OUT_ORDERED ? at / 64 * 64 + at % 16 / 8 * 32 + at % 4 * 8 + at % 64 / 16 * 2 + at % 8 / 4 : at;
};
// Writes the sums of a unit's lines: BIASED plus `bias` [EXPERTS, _].
auto store_results = [&](const float (&sum)[4 * SETS], int unit, const int* item, int parity) {
  const int row = unit % tiles * EACH + thread / 32 * (EACH / 8) + thread % 32 / 4;
  const int count = item[0] >> 16, expert = item[0] & 0xffff;
  const long biases_at = (long)expert * OUT * (GATED ? 2 : 1);
  auto biased = [&](float x, int at) -> float { return BIASED ? x + up(bias[biases_at + at]) : x; };
  #pragma unroll
  for (int i = 0; i < 4 * SETS; i++) {
    const int line = i / 4 * 8 + thread % 4 * 2 + i % 2, to = row + i % 4 / 2 * 8;
    if (GATED && i % 4 >= 2) continue;
    if (line >= count || to >= OUT) continue;
    float one = biased(sum[i], to);
    if (GATED) one = activated(one, biased(sum[i + 2], OUT + to), LIMIT, N());
    down(one, (N*)out + (long)targets[parity][line] * OUT + place_of(to));
  }
};

// The beginning of expert_product*.cu: the lines and weights that a thread block multiplies.
// Products of lines with the weights [EXPERTS, WEIGHT_ROWS, IN] of the experts that they have chosen, by the items of
// `plan` (expert_routing.cu): if GATED, x [LINES, IN] -> out [choices by expert, OUT], the activation of gate and up;
// otherwise x [choices by expert, IN] -> out [choices, OUT]. SHARED: every line is also in an item of the expert
// with the number EXPERTS. Items are divided into units, tiles of ROWS rows of the weight, each with all lines
// of an item, up to 8 * SETS. A gated tile alternates eight gates with the eight ups that belong to them, so that
// a thread has the sums of both.
constexpr int ALL = 8 * SETS;
constexpr int EACH = GATED ? ROWS / 2 : ROWS;  // results of a tile for a line
const int OUT = WEIGHT_ROWS / (GATED ? 2 : 1);
const int lines = x_shape[0] / (GATED ? 1 : CHOSEN + SHARED), choices = lines * CHOSEN;
const int tiles = (OUT + EACH - 1) / EACH;
const int* const sorted = (const int*)plan + 4 + 2 * choices;
const int* const items = (const int*)plan + (5 + 3 * choices + SHARED * lines) / 2 * 2;
const int units = *(const int*)plan * tiles;
const int thread = threadIdx.x;
extern __shared__ uint4 space[];
const unsigned base = (shared_address(space) + 1023) & ~1023u;
// The row of x that is a line of an item.
auto source_of = [&](const int* item, int line) -> int {
  const int choice = GATED ? sorted[item[1] + line] : item[1] + line;
  return !GATED ? choice : choice < choices ? choice / CHOSEN : choice - choices;
};
// The row of `out` for a line of an item.
auto target_of = [&](const int* item, int line) -> int { return GATED ? item[1] + line : sorted[item[1] + line]; };
// Writes the sums of an item's lines, if BIASED plus `bias` [EXPERTS, _]. `row`: the column of `out` for the first sum.
auto store_results = [&](const float (&sum)[4 * SETS], int row, const int* item, auto target) {
  const int count = item[0] >> 16, expert = item[0] & 0xffff;
  const long biases_at = (long)expert * OUT * (GATED ? 2 : 1);
  auto bias_of = [&](int at, bool used) -> float { return BIASED && used ? up(bias[biases_at + at]) : 0.f; };
  const float first = bias_of(row, row < OUT), second = GATED ? bias_of(OUT + row, row < OUT) : bias_of(row + 8, row + 8 < OUT);
  float found[4 * SETS];  // computed before any branch: with a branch around each they would wait for each other
  #pragma unroll
  for (int i = 0; i < 4 * SETS; i++) found[i] = BIASED ? sum[i] + (i % 4 >= 2 ? second : first) : sum[i];
  #pragma unroll
  for (int i = 0; i < 4 * SETS; i++)
    if (GATED && i % 4 < 2) found[i] = activated(found[i], found[i + 2], LIMIT, N());
  #pragma unroll
  for (int i = 0; i < 4 * SETS; i++) {
    const int line = i / 4 * 8 + thread % 4 * 2 + i % 2, to = row + i % 4 / 2 * 8;
    if (line < count && to < OUT && !(GATED && i % 4 >= 2))
      down(found[i], (N*)out + (unsigned)(target(line) * OUT + to));
  }
};

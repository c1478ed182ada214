// All layers of a pass over lines of rows, each with logits, in one launch: hidden states [LINES, HIDDEN] after the
// last norm. The launch has as many thread blocks as the GPU has multiprocessors. They are all resident and
// wait for each other between the phases of a layer: product of queries, keys and values; attention; product
// of its output; sum and norm; gated products; product of these; sum and norm of the next layer. A phase
// is a loop over tiles. A product in SPLITS parts leaves these to the next phase, in `partial`
// [SPLITS, LINES, OUT]. All sums are in the order of matmul_tiled.cu, ragged_attention.cu and rms_norm.cu.
// While a block waits it begins to read the weight that it multiplies next: AHEAD steps, since more would delay
// the numbers that others wait for. If lines may follow each other in a row, `writes_first` is not 0, and keys
// and values of all lines are written before any line attends, which is one phase more.
constexpr int ALL_THREADS = TEAMS * 128, ALL_WARPS = ALL_THREADS / 32;
constexpr int QUERIES_WIDTH = HEADS * GROUP * SIZE, QKV = (GROUP + 2) * HEADS * SIZE, HALF = TURNED / 2;
constexpr int ITEM = 8;  // numbers; five of each line come before the items, see plan_shape.PlanShape
const int LINES = (plan_shape[0] - EXTRA_ITEMS * ITEM) / (5 + ITEM);
struct Layer {  // after the last layer only `norm` is set
  const N *norm, *qkv, *bias, *query_norm, *key_norm, *out, *feed_norm, *gate_up, *down;
  N *keys, *values;
  long long window;  // keys that a line sees; 0: all
};
extern __shared__ uint4 space[];
constexpr int NORM_WARPS = (HIDDEN + 255) / 256;  // warps of rms_norm.cu
Layer* const layer_table = (Layer*)space;
float* const norm_sums = (float*)(layer_table + LAYERS + 1);
bool* const failed = (bool*)(norm_sums + NORM_WARPS);
int* const befores = (int*)(failed + 16);
N* const fresh_lines = (N*)(befores + 8);  // [TEAMS][(GROUP + 2) * SIZE]
const unsigned base = (shared_address(fresh_lines + TEAMS * (GROUP + 2) * SIZE) + 1023) & ~1023u;
char* const ring = (char*)space + (base - shared_address(space));

for (int i = threadIdx.x; i < (int)sizeof(Layer) / 8 * (LAYERS + 1); i += ALL_THREADS)
  ((long long*)layer_table)[i] = ((const long long*)layers)[i];
GridBarrier barrier((unsigned*)state, failed);
auto give_up = [&] {
  for (int i = threadIdx.x; i < LINES * HIDDEN; i += ALL_THREADS) down(__uint_as_float(0x7fc00000), (N*)hidden + i);
};
if (GIVES_UP && *failed) return give_up();

// A weight [rows, in] that is multiplied in SPLITS parts of its columns; a gated one has the gates first.
struct Weight {
  const N* numbers;
  int in, rows, splits;
  bool gated;
};
auto tile_of = [](const Weight& weight, int n) -> WeightTile<N> {
  const int tiles = weight.rows / TILE_ROWS, steps = weight.in / 64, part = n / tiles;
  const int half = weight.gated ? TILE_ROWS / 2 : TILE_ROWS;
  return {weight.numbers + (long)(n % tiles) * half * weight.in, weight.in, half,
          weight.gated ? weight.rows / 2 - half : 0, steps * part / weight.splits,
          steps * (part + 1) / weight.splits};
};
// Begins steps [from, to) of the product that this block multiplies first, while nothing else uses the ring.
auto begin_weight = [&](const Weight& weight, int from, int to) {
  if (blockIdx.x < weight.rows / TILE_ROWS * weight.splits)
    begin_product<SETS, STAGES, ALL_THREADS>(tile_of(weight, blockIdx.x), from, to, base);
};
// The products of a layer, in the order of their use: queries, keys and values; the output of attention;
// gates and ups; the output of the feed-forward.
constexpr int TO_LINES = 0, TO_OUTPUT = 1, TO_GATES = 2, TO_DOWN = 3, PRODUCTS = 4;
auto weight_of = [&](int number) -> Weight {  // of all products of all layers
  const Layer& layer = layer_table[number / PRODUCTS];
  const int kind = number % PRODUCTS;
  if (kind == TO_LINES) return {layer.qkv, HIDDEN, QKV, QKV_SPLITS, false};
  if (kind == TO_OUTPUT) return {layer.out, QUERIES_WIDTH, HIDDEN, OUT_SPLITS, false};
  if (kind == TO_GATES) return {layer.gate_up, HIDDEN, 2 * WIDTH, 1, true};
  return {layer.down, WIDTH, HIDDEN, DOWN_SPLITS, false};
};
// Multiplies lines [LINES, in]; writes the sums of parts to `partial`, and silu(gate) * up to `gates`. The first
// `begun` steps of the block's first tile have begun already.
auto multiply = [&](const N* x, const Weight& weight, int begun) {
  const int tiles = weight.rows / TILE_ROWS, count = tiles * weight.splits;
  #pragma unroll 1
  for (int n = blockIdx.x; n < count; n += gridDim.x) {
    float sum[4 * SETS];
    if (n != blockIdx.x) __syncthreads();  // all threads have multiplied the columns that the next ones overwrite
    tiled_product<SETS, STAGES, ALL_THREADS>(sum, tile_of(weight, n), x, LINES, base, n == blockIdx.x ? begun : 0);
    if (weight.gated) __syncthreads();
    float* const found = (float*)ring;  // [8 * SETS][TILE_ROWS + 1]
    float* const parts = (float*)partial + (long)(n / tiles) * LINES * weight.rows + n % tiles * TILE_ROWS;
    if (threadIdx.x < 256)
      #pragma unroll
      for (int i = 0; i < 4 * SETS; i++) {
        const int line = tile_line(threadIdx.x, i), row = tile_row(threadIdx.x, i);
        if (weight.gated)
          found[line * (TILE_ROWS + 1) + row] = sum[i];
        else if (line < LINES)
          parts[(long)line * weight.rows + row] = sum[i];
      }
    if (!weight.gated) continue;
    __syncthreads();
    constexpr int EACH = TILE_ROWS / 2;
    for (int i = threadIdx.x; i < LINES * EACH; i += ALL_THREADS) {
      const float* const line = found + i / EACH * (TILE_ROWS + 1) + i % EACH;
      down(gated(line[0], line[EACH], N()), (N*)gates + (long)(i / EACH) * WIDTH + n * EACH + i % EACH);
    }
  }
};
// Eight sums of parts [SPLITS, LINES, width] from a column on, in the order of the parts.
auto sum_parts = [&](float (&sum)[8], int splits, int line, int column, int width) {
  float4 low[MAX_SPLITS], high[MAX_SPLITS];
  #pragma unroll
  for (int p = 0; p < MAX_SPLITS; p++)
    if (p < splits) {
      const float4* const from = (const float4*)((float*)partial + ((long)p * LINES + line) * width + column);
      low[p] = __ldcg(from);
      high[p] = __ldcg(from + 1);
    }
  #pragma unroll
  for (int i = 0; i < 8; i++) sum[i] = 0;
  #pragma unroll
  for (int p = 0; p < MAX_SPLITS; p++)
    if (p < splits) {
      sum[0] += low[p].x; sum[1] += low[p].y; sum[2] += low[p].z; sum[3] += low[p].w;
      sum[4] += high[p].x; sum[5] += high[p].y; sum[6] += high[p].z; sum[7] += high[p].w;
    }
};
// The residual line plus the sums of a product's parts, if there are any, and its norm, as in rms_norm.cu.
auto add_norm = [&](int splits, int line, const N* beside, const N* gain, N* to) {
  constexpr int EACH = (NORM_WARPS + ALL_WARPS - 1) / ALL_WARPS;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  Some<N, 8> kept[EACH], gains[EACH];
  #pragma unroll
  for (int e = 0; e < EACH; e++) {
    const int one = e * ALL_WARPS + warp, at = one * 256 + lane * 8;
    float squares = 0;
    if (at < HIDDEN) {
      kept[e] = *(const Some<N, 8>*)(beside + at);
      gains[e] = *(const Some<N, 8>*)(gain + at);
      if (splits > 0) {
        float sum[8];
        sum_parts(sum, splits, line, at, HIDDEN);
        #pragma unroll
        for (int i = 0; i < 8; i++) {
          N rounded;
          down(sum[i], &rounded);
          down(up(rounded) + up(kept[e].n[i]), &kept[e].n[i]);
        }
      }
      #pragma unroll
      for (int i = 0; i < 8; i++) squares += up(kept[e].n[i]) * up(kept[e].n[i]);
      *(Some<N, 8>*)((N*)residual + (long)line * HIDDEN + at) = kept[e];
    }
    #pragma unroll
    for (int o = 16; o > 0; o >>= 1) squares += __shfl_xor_sync(0xffffffff, squares, o);
    if (lane == 0 && one < NORM_WARPS) norm_sums[one] = squares;
  }
  __syncthreads();
  float all = 0;
  for (int w = 0; w < NORM_WARPS; w++) all += norm_sums[w];
  const float factor = rsqrtf(all / HIDDEN + EPS);
  #pragma unroll
  for (int e = 0; e < EACH; e++) {
    const int at = (e * ALL_WARPS + warp) * 256 + lane * 8;
    if (at < HIDDEN) {
      Some<N, 8> result;
      #pragma unroll
      for (int i = 0; i < 8; i++) {
        N rounded;
        down(up(kept[e].n[i]) * factor, &rounded);
        down(up(rounded) * up(gains[e].n[i]), &result.n[i]);
      }
      *(Some<N, 8>*)(to + (long)line * HIDDEN + at) = result;
    }
  }
  __syncthreads();  // all threads have read the sums
};

// An item of the work list for a key head: a part of the keys of one line, see work_list.py. `lines` is 0
// after the last item; `count` is 0 for items that are padding lines, which see nothing.
struct Item {
  int line, lines, table, head, low, high, part, count, unit;  // the line sees the keys [low, high)
  int first, last;  // of this part
};
constexpr int STEP = 16 * 4;  // keys that a team reads at a time
auto item_of = [&](int n, const Layer& layer) -> Item {
  if (n >= (LINES + EXTRA_ITEMS) * HEADS) return Item{};
  const int* const at = (const int*)numbers + 5 * LINES + n / HEADS * ITEM;
  Item item = {at[0], at[1], at[2], n % HEADS, at[3], at[4], at[5], at[6], at[7]};
  if (layer.window > 0) item.low = max(item.low, item.high - (int)layer.window);
  const int from = item.low / STEP * STEP, count = max(item.count, 1);
  const int each = count == 1 ? item.high - from : ((item.high - from + count - 1) / count + STEP - 1) / STEP * STEP;
  item.first = from + item.part * each;
  item.last = min(item.high, item.first + each);
  return item;
};
auto slot_of = [&](const Item& item, int token) -> long {
  return ((long)tables[item.table + token / BLOCK] * HEADS + item.head) * BLOCK + token % BLOCK;
};

// The numbers of the pass come from the host's memory; the embedding and the first norm; rotations.
for (int i = blockIdx.x * ALL_THREADS + threadIdx.x; i < plan_shape[0]; i += gridDim.x * ALL_THREADS)
  ((int*)numbers)[i] = plan[i];
for (int i = blockIdx.x * ALL_THREADS + threadIdx.x; i < LINES * HALF; i += gridDim.x * ALL_THREADS) {
  const float angle = (float)plan[LINES + i / HALF] * ROPE_SCALE * turns[i % HALF];
  ((float*)cosines)[i] = cosf(angle) * ROPE_GAIN;
  ((float*)sines)[i] = sinf(angle) * ROPE_GAIN;
}
__syncthreads();
for (int line = blockIdx.x; line < LINES; line += gridDim.x) {
  const int id = plan[line], known = id >= 0 ? id : drawn[-1 - id];
  add_norm(0, line, (const N*)embedding + (long)known * HIDDEN, layer_table[0].norm, (N*)normed);
}
barrier.arrive();
begin_weight(weight_of(0), 0, AHEAD);
if (!barrier.wait<GIVES_UP>()) return give_up();
#pragma unroll 1
for (int number = 0; number < LAYERS * PRODUCTS; number++) {
  const int kind = number % PRODUCTS;
  const bool goes_on = number + 1 < LAYERS * PRODUCTS;
  const Layer& layer = layer_table[number / PRODUCTS];
  const N* const x = (const N*)(kind == TO_OUTPUT ? attended : kind == TO_DOWN ? gates : normed);
  multiply(x, weight_of(number), kind == TO_GATES || kind == TO_LINES && number > 0 ? STAGES - 2 : AHEAD);
  barrier.arrive();
  if (goes_on && kind != TO_LINES) begin_weight(weight_of(number + 1), 0, AHEAD);
  if (!barrier.wait<GIVES_UP>()) return give_up();
  if (kind == TO_GATES) continue;
  if (kind == TO_LINES) {
    #include LINES_OF_HEADS
    const bool writes = writes_first[0] != 0;
    if (writes) {
      write_lines();
      barrier.arrive();
      if (!barrier.wait<GIVES_UP>()) return give_up();
    }
    #include ATTENTION
  } else {
    const N* const gain = kind == TO_OUTPUT ? layer.feed_norm : layer_table[number / PRODUCTS + 1].norm;
    N* const to = goes_on ? (N*)normed : (N*)hidden;
    for (int line = blockIdx.x; line < LINES; line += gridDim.x)
      add_norm(kind == TO_OUTPUT ? OUT_SPLITS : DOWN_SPLITS, line, (const N*)residual + (long)line * HIDDEN, gain, to);
    if (!goes_on) break;
  }
  barrier.arrive();
  begin_weight(weight_of(number + 1), kind == TO_LINES ? 0 : AHEAD, kind == TO_LINES ? AHEAD : STAGES - 2);
  if (!barrier.wait<GIVES_UP>()) return give_up();
}
barrier.end();

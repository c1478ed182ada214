// Products of some tokens ("lines") with a weight, out [LINES, OUT] = x [LINES, IN] weight
// [OUT, IN]^T, in the tensor cores of Hopper. A thread block has TILE_ROWS rows of the weight, half of them
// gates if products are gated, all lines, and the columns of one of SPLITS parts (tiled_product.cuh). The
// part that finishes last adds up all parts. BIASED: plus `bias` [rows of the weight].
constexpr int ROWS = TILE_ROWS, ALL = 8 * SETS, THREADS = 2 * ROWS;
constexpr int EACH = GATED ? ROWS / 2 : ROWS;  // results of a thread block for a line
const int LINES = x_shape[0], IN = x_shape[1], OUT = weight_shape[0] / (GATED ? 2 : 1);
const int first = blockIdx.x * EACH, part = blockIdx.y, steps = IN / 64;
extern __shared__ uint4 space[];
float sum[4 * SETS];
const WeightTile<N> tile = {(const N*)weight + (long)first * IN, IN, EACH, OUT - EACH,
                            steps * part / SPLITS, steps * (part + 1) / SPLITS};
tiled_product<SETS, STAGES, THREADS>(sum, tile, (const N*)x, LINES,
                                     (shared_address(space) + 1023) & ~1023u, 0);
if (SPLITS > 1) {
  __shared__ int before;
  float4* const parts = (float4*)partial + (long)blockIdx.x * SPLITS * SETS * THREADS + threadIdx.x;
  #pragma unroll
  for (int set = 0; set < SETS; set++)
    parts[(part * SETS + set) * THREADS] = *(float4*)&sum[4 * set];
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) before = atomicAdd((int*)arrived + blockIdx.x, 1);
  __syncthreads();
  if (before < SPLITS - 1) return;
  __threadfence();
  if (threadIdx.x == 0) ((int*)arrived)[blockIdx.x] = 0;
  #pragma unroll
  for (int i = 0; i < 4 * SETS; i++) sum[i] = 0;
  for (int p = 0; p < SPLITS; p++)
    #pragma unroll
    for (int set = 0; set < SETS; set++) {
      const float4 some = __ldcg(parts + (p * SETS + set) * THREADS);
      sum[4 * set] += some.x;
      sum[4 * set + 1] += some.y;
      sum[4 * set + 2] += some.z;
      sum[4 * set + 3] += some.w;
    }
}
__syncthreads();
float* const found = (float*)space;  // [ALL][ROWS + 1]
#pragma unroll
for (int i = 0; i < 4 * SETS; i++)
  found[tile_line(threadIdx.x, i) * (ROWS + 1) + tile_row(threadIdx.x, i)] = sum[i];
__syncthreads();
for (int i = threadIdx.x; i < LINES * EACH; i += THREADS) {
  const int row = i % EACH;
  const float* const line = found + i / EACH * (ROWS + 1);
  down(result_of<GATED, BIASED>(line[row], GATED ? line[EACH + row] : 0, (const N*)bias, first + row, OUT),
       (N*)out + (long)(i / EACH) * OUT + first + row);
}

// Products of some tokens ("lines") with a weight, out [LINES, OUT] = x [LINES, IN] weight
// [OUT, IN]^T, in the tensor cores of Hopper. A thread block has 128 rows of the weight, half of them
// gates where products are gated, all lines, and the columns of one of SPLITS parts. Both operands come
// through shared memory, 64 columns at a time and STAGES - 2 steps ahead, in the layout of the tensor
// cores: 128 bytes a row, whose 16-byte pieces are swizzled differently in each of eight rows. Each of
// two groups of four warps multiplies 64 rows by all lines while the next columns are copied. The part
// that finishes last adds up all parts.
constexpr int ROWS = 128, ALL = 8 * SETS, THREADS = 256;
constexpr int STAGE = (ROWS + ALL) * 128, COPIES = (ROWS + ALL) * 8;  // bytes, and pieces of 16 bytes
constexpr int EACH = GATED ? ROWS / 2 : ROWS;  // results of a thread block for a line
const int LINES = x_shape[0], IN = x_shape[1], OUT = weight_shape[0] / (GATED ? 2 : 1);
const int first = blockIdx.x * EACH, part = blockIdx.y, steps = IN / 64;
const int begin = steps * part / SPLITS, end = steps * (part + 1) / SPLITS;
extern __shared__ uint4 space[];
const unsigned shared_base = (shared_address(space) + 1023) & ~1023u;
auto fetch = [&](int step) {
  if (step < end) {
    const unsigned to = shared_base + (step - begin) % STAGES * STAGE;
    #pragma unroll
    for (int n = 0; n < (COPIES + THREADS - 1) / THREADS; n++) {
      const int i = n * THREADS + threadIdx.x, row = i / 8, piece = i % 8;
      const N* from = (const N*)x + (long)min(row - ROWS, LINES - 1) * IN;
      if (row < ROWS)
        from = (const N*)weight
               + (GATED && row >= EACH ? (long)OUT + first + row - EACH : (long)first + row) * IN;
      if (row < ROWS + ALL)
        copy(to + row * 128 + (piece ^ row % 8) * 16, from + step * 64 + piece * 8);
    }
  }
  commit_copies();
};
// The descriptor of a matrix: swizzled rows of 128 bytes, eight rows in 1,024 bytes.
auto matrix = [](unsigned at) -> unsigned long long {
  return (unsigned long long)((at & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
};
float sum[4 * SETS];
#pragma unroll
for (int i = 0; i < 4 * SETS; i++) sum[i] = 0;
#pragma unroll
for (int ahead = 0; ahead < STAGES - 2; ahead++) fetch(begin + ahead);
const int group = threadIdx.x / 128;
for (int step = begin; step < end; step++) {
  wait_copies<STAGES - 3>();
  fence_products();
  __syncthreads();  // all threads have multiplied what the next columns overwrite
  fetch(step + STAGES - 2);
  const unsigned here = shared_base + (step - begin) % STAGES * STAGE;
  begin_products();
  const unsigned long long rows = matrix(here + group * 64 * 128), lines = matrix(here + ROWS * 128);
  #pragma unroll
  for (int k = 0; k < 4; k++) group_mma(sum, rows + 2 * k, lines + 2 * k);
  commit_products();
  wait_products<1>();
}
wait_products<0>();
wait_copies<0>();
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
const int lane = threadIdx.x & 31, at = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
for (int i = 0; i < 4 * SETS; i++)
  found[(i / 4 * 8 + lane % 4 * 2 + i % 2) * (ROWS + 1) + at + i % 4 / 2 * 8] = sum[i];
__syncthreads();
for (int i = threadIdx.x; i < LINES * EACH; i += THREADS) {
  const int row = i % EACH;
  const float* const line = found + i / EACH * (ROWS + 1);
  down(GATED ? gated(line[row], line[EACH + row], N()) : line[row],
       (N*)out + (long)(i / EACH) * OUT + first + row);
}

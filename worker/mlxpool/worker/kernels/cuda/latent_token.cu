// The first part of a layer of latent attention for one token, in one launch whose thread blocks wait for each other twice
// (token_rows.cuh). First, the norm of x [1, SIZE] is multiplied with `first` [QUERIES + RANK + TURNED, SIZE]. The first
// QUERIES numbers of this product, normed, are multiplied with `second` [HEADS * (PLAIN + TURNED), QUERIES], and then
// PLAIN numbers of each head with `third` [HEADS, RANK, PLAIN]: out [HEADS, RANK + TURNED], whose last TURNED numbers
// come from the second product, rotated. The other numbers of the first product are the latent. It is normed and rotated
// and written into the token's slot of the pool, unless the slot is -1. Numbers are rounded as by the separate kernels.
// `memory`: the state of the barrier, the first product, the second product.
constexpr int LINE = RANK + TURNED, ASKED = PLAIN + TURNED, ALL = TOKEN_WARPS * BLOCKS;
constexpr int MOST = SIZE > HEADS * ASKED ? SIZE : HEADS * ASKED;  // numbers that are multiplied
extern __shared__ uint4 space[];
uint4* const line = space;
float* const sums = (float*)(line + MOST / 8);  // [TOKEN_WARPS]
const int lane = threadIdx.x & 31, own = (threadIdx.x >> 5) * BLOCKS + blockIdx.x;
N* const compressed = (N*)((float*)memory + 4);
N* const queries = compressed + QUERIES + LINE;
GridBarrier barrier((unsigned*)memory, (bool*)(sums + TOKEN_WARPS));
auto first_row = [&](int row) { return (const N*)first + (long)row * SIZE; };
auto second_row = [&](int row) { return (const N*)second + (long)row * QUERIES; };
auto third_row = [&](int row) { return (const N*)third + (long)row * PLAIN; };
auto all_of_it = [&](int) { return line; };
{
  TokenRows<N, SIZE, QUERIES + LINE, ALL> rows;
  rows.ask(own, 0, first_row);
  norm_token<N, SIZE>((const N*)x, (const N*)gain, EPS, line, sums);
  rows.multiply(own, first_row, all_of_it, [&](int row, float sum) {
    if (lane == 0) down(sum, compressed + row);
  });
}
{
  TokenRows<N, QUERIES, HEADS * ASKED, ALL> rows;
  rows.ask(own, 0, second_row);
  barrier.arrive();
  if (!wait_for_all<GIVES_UP>(barrier, (N*)out, HEADS * LINE)) return;
  norm_token<N, QUERIES>(compressed, (const N*)query_gain, INNER_EPS, line, sums);
  rows.multiply(own, second_row, all_of_it, [&](int row, float sum) {
    if (lane == 0) down(sum, queries + row);
  });
}
// Rotates by the angles of the only line.
auto turned = [&](const N* numbers, int d) -> float {
  return rotated<N, TURNED, TRADITIONAL>(numbers, 1, d, (const float*)cosines, (const float*)sines);
};
const long slot = slots[0];
if (blockIdx.x == BLOCKS - 1) {
  __syncthreads();
  norm_token<N, RANK>(compressed + QUERIES, (const N*)latent_gain, INNER_EPS, line, sums);
  N* const latent = (N*)pool + slot * LINE;
  N* const key = (N*)(line + RANK / 8);
  for (int i = threadIdx.x; i < TURNED / 8; i += TOKEN_THREADS)
    line[RANK / 8 + i] = __ldcg((const uint4*)(compressed + QUERIES + RANK) + i);
  __syncthreads();
  for (int i = threadIdx.x; i < LINE && slot >= 0; i += TOKEN_THREADS)
    if (i < RANK) latent[i] = ((const N*)line)[i];
    else down(turned(key, i - RANK), latent + i);
}
{
  TokenRows<N, PLAIN, HEADS * RANK, ALL> rows;
  rows.ask(own, 0, third_row);
  barrier.arrive();
  if (!wait_for_all<GIVES_UP>(barrier, (N*)out, HEADS * LINE)) return;
  barrier.end();
  read_token(queries, HEADS * ASKED, line);
  rows.multiply(own, third_row, [&](int row) { return line + row / RANK * (ASKED / 8); }, [&](int row, float sum) {
    if (lane == 0) down(sum, (N*)out + row / RANK * LINE + row % RANK);
  });
}
for (int head = blockIdx.x; head < HEADS; head += BLOCKS)
  for (int d = threadIdx.x; d < TURNED; d += TOKEN_THREADS)
    down(turned((const N*)line + head * ASKED + PLAIN, d), (N*)out + head * LINE + RANK + d);

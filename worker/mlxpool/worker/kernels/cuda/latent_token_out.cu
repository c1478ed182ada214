// The last part of a layer of latent attention for one token, in one launch whose thread blocks wait for each other once
// (token_rows.cuh): out [1, SIZE] = the RESIDUAL, if any, + `last` [SIZE, HEADS * VALUE] times the values of the heads,
// `values` [HEADS, VALUE, RANK] times x [HEADS, RANK]. Numbers are rounded as by the separate kernels. `memory`:
// the state of the barrier, and the values.
constexpr int ALL = TOKEN_WARPS * BLOCKS;
extern __shared__ uint4 space[];
uint4* const line = space;
constexpr int MOST = RANK > VALUE ? RANK * HEADS : VALUE * HEADS;
const int lane = threadIdx.x & 31, own = (threadIdx.x >> 5) * BLOCKS + blockIdx.x;
N* const made = (N*)((float*)memory + 4);
GridBarrier barrier((unsigned*)memory, (bool*)(line + MOST / 8));
auto value_row = [&](int row) { return (const N*)values + (long)row * RANK; };
auto last_row = [&](int row) { return (const N*)last + (long)row * HEADS * VALUE; };
{
  TokenRows<N, RANK, HEADS * VALUE, ALL> rows;
  rows.ask(own, 0, value_row);
  read_token((const N*)x, HEADS * RANK, line);
  rows.multiply(own, value_row, [&](int row) { return line + row / VALUE * (RANK / 8); }, [&](int row, float sum) {
    if (lane == 0) down(sum, made + row);
  });
}
TokenRows<N, HEADS * VALUE, SIZE, ALL> rows;
rows.ask(own, 0, last_row);
for (int i = lane + rows.HELD * 4; own < SIZE && i < HEADS * VALUE / 64; i += 32) prefetch(last_row(own) + i * 64);
barrier.arrive();
if (!wait_for_all<GIVES_UP>(barrier, (N*)out, SIZE)) return;
barrier.end();
read_token(made, HEADS * VALUE, line);
rows.multiply(own, last_row, [&](int) { return line; }, [&](int row, float sum) {
  N rounded;
  down(sum, &rounded);
  if (lane == 0) down(RESIDUAL ? up(rounded) + up(((const N*)residual)[row]) : up(rounded), (N*)out + row);
});

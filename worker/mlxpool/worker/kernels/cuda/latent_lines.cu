// The first product of a layer of latent attention gives a line QUERIES compressed queries, then a latent of RANK
// numbers and a key of TURNED numbers. This kernel writes the norm of the queries to `out`, and the latent, its
// numbers normed and its key rotated, into the line's slot of the pool. A line without a slot (-1) writes no latent.
// A thread block has a line; its first warps have the queries, the next the numbers, the last warp the key.
constexpr int EACH = 8, WARPS = THREADS / 32;
constexpr int QUERY_THREADS = (QUERIES / EACH + 31) / 32 * 32, NUMBER_THREADS = (RANK / EACH + 31) / 32 * 32;
constexpr int LINE = RANK + TURNED;
using Numbers = Some<N, EACH>;
__shared__ float parts[WARPS];
const int line = blockIdx.x, thread = threadIdx.x;
const bool asks = thread < QUERY_THREADS, turns = thread >= QUERY_THREADS + NUMBER_THREADS;
const int at = (asks ? thread : turns ? thread - QUERY_THREADS - NUMBER_THREADS : thread - QUERY_THREADS) * EACH;
const bool there = at < (asks ? QUERIES : turns ? TURNED : RANK);
const N* const from = (const N*)lines + (long)line * (QUERIES + LINE) + (asks ? 0 : turns ? QUERIES + RANK : QUERIES);
const long slot = slots[line];
N* const latent = (N*)pool + slot * LINE;
Numbers some;
float squares = 0;
if (there) {
  some = *(const Numbers*)(from + at);
  #pragma unroll
  for (int i = 0; i < EACH; i++) squares += up(some.n[i]) * up(some.n[i]);
}
#pragma unroll
for (int other = 16; other > 0; other /= 2) squares += __shfl_xor_sync(0xffffffff, squares, other);
if ((thread & 31) == 0) parts[thread >> 5] = squares;
__syncthreads();
if (!there) return;
if (turns) {
  if (slot < 0) return;
  Numbers turned;
  #pragma unroll
  for (int i = 0; i < EACH; i++)
    down(rotated<N, TURNED, TRADITIONAL>(from, 1, at + i, (const float*)cosines + (long)line * (TURNED / 2),
                                         (const float*)sines + (long)line * (TURNED / 2)), &turned.n[i]);
  *(Numbers*)(latent + RANK + at) = turned;
  return;
}
float all = 0;
for (int warp = asks ? 0 : QUERY_THREADS / 32; warp < (asks ? QUERY_THREADS : QUERY_THREADS + NUMBER_THREADS) / 32; warp++)
  all += parts[warp];
const float factor = rsqrtf(all / (asks ? QUERIES : RANK) + EPS);
const Numbers gain = *(const Numbers*)((const N*)(asks ? query_gain : latent_gain) + at);
Numbers normed;
#pragma unroll
for (int i = 0; i < EACH; i++) {
  N rounded;
  down(up(some.n[i]) * factor, &rounded);
  down(up(rounded) * up(gain.n[i]), &normed.n[i]);
}
if (asks) *(Numbers*)((N*)out + (long)line * QUERIES + at) = normed;
else if (slot >= 0) *(Numbers*)(latent + at) = normed;

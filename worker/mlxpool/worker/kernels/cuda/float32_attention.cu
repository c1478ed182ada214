// Attention of one token of each row in float32, without tensor cores. One thread block for each row,
// key head and part of the row. A warp reads UNROLL tokens at a time, a lane E numbers of each head;
// then the results of the warps are combined by their softmax weights. The part with the last token
// of the row writes that token first.
constexpr int E = SIZE / 32;
const int row = blockIdx.x, head = blockIdx.y, part = blockIdx.z;
const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
const int length = positions[row] + 1, across = table_shape[1];
const int from = WINDOW > 0 ? max(0, length - WINDOW) : 0, each = (length - from + PARTS - 1) / PARTS;
const int first = from + part * each, last = min(length, first + each);
const int* blocks = (const int*)table + (long)row * across;
auto place = [&](int token) -> long {
  return (((long)blocks[token / BLOCK] * HEADS + head) * BLOCK + token % BLOCK) * SIZE;
};
if (first < length && last == length) {
  for (int d = threadIdx.x; d < SIZE; d += blockDim.x) {
    long from = ((long)row * HEADS + head) * SIZE + d, to = place(length - 1) + d;
    ((N*)keys)[to] = ((const N*)fresh_keys)[from];
    ((N*)values)[to] = ((const N*)fresh_values)[from];
  }
  __syncthreads();
}
float asked[GROUP][E], sum[GROUP][E], most[GROUP], total[GROUP];
#pragma unroll
for (int g = 0; g < GROUP; g++) {
  most[g] = -1e30f;
  total[g] = 0;
  for (int e = 0; e < E; e++) {
    long from = (((long)row * HEADS + head) * GROUP + g) * SIZE + lane * E + e;
    asked[g][e] = q[from] * SCALE;
    sum[g][e] = 0;
  }
}
for (int token = first + warp * UNROLL; token < last; token += WARPS * UNROLL) {
  float k[UNROLL][E], v[UNROLL][E];
  #pragma unroll
  for (int u = 0; u < UNROLL; u++) {
    long from = place(min(token + u, last - 1)) + lane * E;
    Some<N, E> ks = *(const Some<N, E>*)((const N*)keys + from);
    Some<N, E> vs = *(const Some<N, E>*)((const N*)values + from);
    for (int e = 0; e < E; e++) { k[u][e] = up(ks.n[e]); v[u][e] = up(vs.n[e]); }
  }
  #pragma unroll
  for (int g = 0; g < GROUP; g++) {
    float score[UNROLL];
    #pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      score[u] = 0;
      for (int e = 0; e < E; e++) score[u] += asked[g][e] * k[u][e];
    }
    #pragma unroll
    for (int o = 16; o > 0; o >>= 1)
      for (int u = 0; u < UNROLL; u++) score[u] += __shfl_xor_sync(0xffffffff, score[u], o);
    float top = most[g];
    #pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      if (token + u >= last) score[u] = -1e30f;
      top = fmaxf(top, score[u]);
    }
    float shrink = __expf(most[g] - top);
    total[g] *= shrink;
    for (int e = 0; e < E; e++) sum[g][e] *= shrink;
    most[g] = top;
    #pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      float share = token + u < last ? __expf(score[u] - top) : 0.f;
      total[g] += share;
      for (int e = 0; e < E; e++) sum[g][e] += share * v[u][e];
    }
  }
}
__shared__ float warp_most[WARPS][GROUP], warp_total[WARPS][GROUP], warp_sum[WARPS][SIZE];
#pragma unroll
for (int g = 0; g < GROUP; g++) {
  if (lane == 0) { warp_most[warp][g] = most[g]; warp_total[warp][g] = total[g]; }
}
#pragma unroll
for (int g = 0; g < GROUP; g++) {
  __syncthreads();
  for (int e = 0; e < E; e++) warp_sum[warp][lane * E + e] = sum[g][e];
  __syncthreads();
  float top = -1e30f, all = 0;
  for (int w = 0; w < WARPS; w++) top = fmaxf(top, warp_most[w][g]);
  for (int w = 0; w < WARPS; w++) all += warp_total[w][g] * __expf(warp_most[w][g] - top);
  long line = (((long)row * HEADS + head) * GROUP + g) * PARTS + part;
  for (int d = threadIdx.x; d < SIZE; d += blockDim.x) {
    float mine = 0;
    for (int w = 0; w < WARPS; w++) mine += warp_sum[w][d] * __expf(warp_most[w][g] - top);
    down(mine / fmaxf(all, 1e-30f), (OUT*)out + line * SIZE + d);
  }
  if (threadIdx.x == 0) weight[line] = all > 0 ? top + __logf(all) : -1e30f;
}

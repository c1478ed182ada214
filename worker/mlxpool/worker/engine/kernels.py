"""Our own CUDA kernels over the block pool, compiled by MLX at their first use.

They write into their input arrays, which is outside MLX's value semantics. That holds because the
pool's arrays are whole, contiguous and never replaced, nothing else touches one of them in an
evaluation in which a kernel writes it, and whoever reads what was written takes the kernel's output
into its own numbers: MLX orders kernels by the arrays they write, and does not know of ours.
`ensure_row_contiguous=False` keeps it from handing a copy to them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx

from mlxpool.worker.engine.blocks import BLOCK

_INPUTS = (
    "q", "fresh_keys", "fresh_values", "keys", "values", "table", "lengths", "width", "scale",
)  # fmt: skip
WARPS = 8  # of a thread block of `attend`
UNROLL = 4  # tokens that a warp reads at once
LANES = 32
FILL = 264  # thread blocks that keep a large GPU busy
LEAST = 64  # tokens of a part; shorter ones cost more than they save
SIZES = (64, 128, 256)  # numbers of a head: each lane reads 2, 4 or 8 of them at once
TYPES = {mx.float32: "float", mx.float16: "__half", mx.bfloat16: "__nv_bfloat16"}

_HEADER = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
__device__ inline float up(float x) { return x; }
__device__ inline float up(__half x) { return __half2float(x); }
__device__ inline float up(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline void down(float x, float* to) { *to = x; }
__device__ inline void down(float x, __half* to) { *to = __float2half(x); }
__device__ inline void down(float x, __nv_bfloat16* to) { *to = __float2bfloat16(x); }
template <typename N, int COUNT> struct alignas(sizeof(N) * COUNT) Some { N n[COUNT]; };
"""

_WRITE = """
long at = (long)blockIdx.x * blockDim.x + threadIdx.x;
if (at < (long)count[0] * HEADS * SIZE) {
  int d = at % SIZE, head = (at / SIZE) % HEADS;
  long slot = slots[at / (SIZE * HEADS)];
  N* to = (N*)pool + ((slot / BLOCK * HEADS + head) * BLOCK + slot % BLOCK) * SIZE;
  to[d] = ((const N*)fresh)[at];
}
if (at == 0) done[0] = 0;
"""

# One thread block for each row, key head and part of the row. Each warp takes UNROLL tokens at a
# time, each lane E numbers of every head; then the warps' results are weighed together. The part
# that has the row's last token writes it first.
_ATTEND = """
constexpr int E = SIZE / 32;
const int row = blockIdx.x, head = blockIdx.y, part = blockIdx.z;
const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
const int length = lengths[row], across = width[0];
const int each = (length + PARTS - 1) / PARTS;
const int first = part * each, last = min(length, first + each);
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
    asked[g][e] = up(((const N*)q)[from]) * scale[0];
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
"""


def serves(heads: int, pairs: int, key_dim: int, value_dim: int, dtype: mx.Dtype) -> bool:
    """Whether `attend` takes heads of these sizes."""
    return key_dim == value_dim and key_dim in SIZES and heads % pairs == 0 and dtype in TYPES


def write(pool: mx.array, fresh: mx.array, slots: mx.array) -> mx.array:
    """Puts fresh [n, heads, size] at tokens `slots` [n] of pool [blocks, heads, BLOCK, size].

    Returns a 0 that readers have to add to the places that they read.
    """
    heads, size = fresh.shape[1:]
    threads = fresh.size
    found: list[mx.array] = _write_kernel(heads, size, pool.dtype)(
        inputs=[pool, mx.contiguous(fresh.astype(pool.dtype)), slots, _number(fresh.shape[0])],
        grid=(-(-threads // 256) * 256, 1, 1),
        threadgroup=(256, 1, 1),
        output_shapes=[(1,)],
        output_dtypes=[mx.int32],
    )
    return found[0]


def attend(
    q: mx.array,
    fresh: tuple[mx.array, mx.array],
    pools: tuple[mx.array, mx.array],
    table: mx.array,
    lengths: mx.array,
    scale: float,
    longest: int,
) -> mx.array:
    """One token for each row: q [R, H, D], fresh keys and values [R, KV, D] -> [R, H, D].

    `lengths` [R] count the new token, which is written into the pools [blocks, KV, BLOCK, D] at
    its place; `table` [R, B] are the rows' blocks. `longest` only decides how rows are parted.
    """
    rows, heads, size = q.shape
    pairs = fresh[0].shape[1]
    parts = parts_of(rows * pairs, longest)
    dtype = pools[0].dtype
    found: list[mx.array] = _attend_kernel(heads // pairs, pairs, size, parts, dtype)(
        inputs=[
            mx.contiguous(q.astype(dtype)),
            *(mx.contiguous(one.astype(dtype)) for one in fresh),
            *pools,
            table,
            lengths,
            _number(table.shape[1]),
            mx.array([scale], dtype=mx.float32),
        ],
        grid=(rows * WARPS * LANES, pairs, parts),
        threadgroup=(WARPS * LANES, 1, 1),
        output_shapes=[(rows, heads, parts, size), (rows, heads, parts)],
        output_dtypes=[mx.float32 if parts > 1 else dtype, mx.float32],
    )
    out, weight = found
    if parts == 1:
        return out[:, :, 0].astype(q.dtype)
    shares = mx.softmax(weight, axis=-1)[..., None]
    return mx.sum(out * shares, axis=2).astype(q.dtype)


def parts_of(blocks: int, longest: int) -> int:
    """Into how many a row is parted: a power of two, so that there are few kernels."""
    parts = 1
    while parts < 32 and blocks * parts < FILL and longest // (2 * parts) >= LEAST:
        parts *= 2
    return parts


@cache
def _write_kernel(heads: int, size: int, dtype: mx.Dtype) -> Any:
    constants = f"constexpr int HEADS = {heads}, SIZE = {size}, BLOCK = {BLOCK};\n"
    return mx.fast.cuda_kernel(
        name=f"mlxpool_write_{heads}_{size}_{_named(dtype)}",
        input_names=["pool", "fresh", "slots", "count"],
        output_names=["done"],
        header=_HEADER,
        source=f"using N = {TYPES[dtype]};\n{constants}{_WRITE}",
        ensure_row_contiguous=False,
    )


@cache
def _attend_kernel(group: int, pairs: int, size: int, parts: int, dtype: mx.Dtype) -> Any:
    constants = (
        f"constexpr int GROUP = {group}, HEADS = {pairs}, SIZE = {size}, PARTS = {parts},"
        f" BLOCK = {BLOCK}, WARPS = {WARPS}, UNROLL = {UNROLL};\n"
        f"using N = {TYPES[dtype]};\nusing OUT = {'float' if parts > 1 else TYPES[dtype]};\n"
    )
    return mx.fast.cuda_kernel(
        name=f"mlxpool_attend_{group}_{pairs}_{size}_{parts}_{_named(dtype)}",
        input_names=[*_INPUTS],
        output_names=["out", "weight"],
        header=_HEADER,
        source=constants + _ATTEND,
        ensure_row_contiguous=False,
    )


def _number(value: int) -> mx.array:
    return mx.array([value], dtype=mx.int32)


def _named(dtype: mx.Dtype) -> str:
    return TYPES[dtype].strip("_")

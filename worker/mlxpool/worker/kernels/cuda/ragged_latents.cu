// Attention of a step's lines over latent vectors (MLA) in a block pool, in the tensor cores of Hopper. All
// heads read the latent of a token: it is the key, and its first RANK numbers are the value. A thread block has
// an item of the work list, which is a tile of neighbouring lines of one row, and EACH of the heads. The heads,
// line by line, are the rows of the tile: up to DECODE_ROWS or ROWS (latent_tile.cuh, or latent_chunk_tile.cuh for
// tiles of more than MAX_FEW rows if VALUE_NUMBERS is not 0). The latents of a tile may be divided into parts. The part
// that finishes last adds up all parts, in their order. Scores are of base 2.
constexpr int THREADS = 256;
extern __shared__ uint4 space[];
__shared__ int before;
const int* const item = (const int*)items + 8 * blockIdx.y;
const int first_line = item[0], lines = item[1], table_at = item[2], high = item[4];
const int part = item[5], count = item[6], unit = item[7], from_head = blockIdx.x * EACH;
if (lines == 0) return;
auto line_at = [&](int line) -> long { return ((long)(first_line + line) * HEADS + from_head) * RANK; };
if (count == 0) {  // padding
  constexpr int PIECES = EACH * RANK / 8;
  for (int i = threadIdx.x; i < lines * PIECES; i += THREADS)
    *((uint4*)((N*)out + line_at(i / PIECES)) + i % PIECES) = uint4{0, 0, 0, 0};
  return;
}
const int asked = lines * EACH;
const int each = count == 1 ? high : ((high + count - 1) / count + TILE_KEYS - 1) / TILE_KEYS * TILE_KEYS;
const long mine = (long)blockIdx.x * UNITS + unit;
float* const parts = (float*)partial + mine * UNIT_ROWS * (RANK + 2);
const long whole = (asked <= DECODE_ROWS ? DECODE_ROWS : ROWS) * (RANK + 2);  // numbers of a part
// Writes the results of a tile's rows, or keeps them as a part: the sums [RANK] of each row, then the greatest
// score of each, then the total of each.
auto finish = [&](const float* sums, const float* most, const float* total) {
  constexpr int LINE_SUMS = RANK + 4;  // as latent_tile.cuh stores them
  if (count == 1) {
    for (int i = threadIdx.x; i < asked * (RANK / 4); i += THREADS) {
      const int g = i / (RANK / 4), d = i % (RANK / 4) * 4;
      const float4 four = *(const float4*)(sums + g * LINE_SUMS + d);
      const float factor = 1 / fmaxf(total[g], 1e-30f);
      const uint2 packed = {pair(four.x * factor, four.y * factor, N()), pair(four.z * factor, four.w * factor, N())};
      *(uint2*)((N*)out + line_at(g / EACH) + g % EACH * RANK + d) = packed;
    }
    return;
  }
  float* const to = parts + part * whole;
  for (int i = threadIdx.x; i < asked * (RANK / 4); i += THREADS) {
    const int g = i / (RANK / 4), d = i % (RANK / 4) * 4;
    *(float4*)(to + g * RANK + d) = *(const float4*)(sums + g * LINE_SUMS + d);
  }
  for (int g = threadIdx.x; g < asked; g += THREADS) {
    to[asked * RANK + g] = most[g];
    to[asked * RANK + asked + g] = total[g];
  }
};
const LatentTile<N> tile = {
    (const N*)pool, (const int*)tables + table_at, (const int*)ends + first_line,
    (const N*)q + ((long)first_line * HEADS + from_head) * LINE, lines, part * each, min(high, (part + 1) * each),
    high};
constexpr float RATE = SCALE * 1.4426950408889634f;
auto attend = [&](auto shape) {
  constexpr int ALL = decltype(shape)::ALL;
  if constexpr (VALUE_NUMBERS > 0 && ALL > MAX_FEW)
    latent_chunk_tile<HEADS, EACH, LINE, RANK, BLOCK, VALUE_NUMBERS>(tile, RATE, (char*)space, finish);
  else
    latent_tile<ALL / 8, HEADS, EACH, LINE, RANK, BLOCK>(tile, RATE, (char*)space, finish);
};
if (asked <= DECODE_ROWS) attend(TileRows<DECODE_ROWS>());
else attend(TileRows<ROWS>());
if (count == 1) return;
__syncthreads();
if (threadIdx.x == 0) {
  __threadfence();  // for the writes of all threads, which wait for each other before and after it
  before = atomicAdd((int*)arrived + mine, 1);
  __threadfence();
}
__syncthreads();
if (before < count - 1) return;
if (threadIdx.x == 0) ((int*)arrived)[mine] = 0;
// The factors of the sums of each part, a warp a row.
float* const weights = (float*)space;  // [count][asked]
const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
for (int g = warp; g < asked; g += THREADS / 32) {
  const float* const most = parts + asked * RANK + g;
  float top = -1e30f, all = 0;
  for (int p = lane; p < count; p += 32) top = fmaxf(top, __ldcg(most + p * whole));
  #pragma unroll
  for (int other = 1; other < 32; other *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, other));
  for (int p = lane; p < count; p += 32) {
    const float weight = power2(__ldcg(most + p * whole) - top);
    weights[p * asked + g] = weight;
    all += weight * __ldcg(most + p * whole + asked);
  }
  #pragma unroll
  for (int other = 1; other < 32; other *= 2) all += __shfl_xor_sync(0xffffffff, all, other);
  for (int p = lane; p < count; p += 32) weights[p * asked + g] /= fmaxf(all, 1e-30f);
}
__syncthreads();
constexpr int AT = 4;  // pieces of 16 bytes that a thread loads at a time
const int pieces = asked * (RANK / 4);
for (int from = threadIdx.x; from < pieces; from += AT * THREADS) {
  float4 sum[AT];
  int at[AT];
  #pragma unroll
  for (int n = 0; n < AT; n++) {
    sum[n] = float4{0, 0, 0, 0};
    at[n] = min(from + n * THREADS, pieces - 1);
  }
  #pragma unroll 2
  for (int p = 0; p < count; p++) {
    #pragma unroll
    for (int n = 0; n < AT; n++) {
      const float4 four = __ldcg((const float4*)(parts + p * whole) + at[n]);
      const float weight = weights[p * asked + at[n] / (RANK / 4)];
      sum[n].x += four.x * weight;
      sum[n].y += four.y * weight;
      sum[n].z += four.z * weight;
      sum[n].w += four.w * weight;
    }
  }
  #pragma unroll
  for (int n = 0; n < AT; n++) {
    if (from + n * THREADS >= pieces) continue;
    const int g = at[n] / (RANK / 4), d = at[n] % (RANK / 4) * 4;
    const uint2 packed = {pair(sum[n].x, sum[n].y, N()), pair(sum[n].z, sum[n].w, N())};
    *(uint2*)((N*)out + line_at(g / EACH) + g % EACH * RANK + d) = packed;
  }
}

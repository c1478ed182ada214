// Keys and values that are stored as 8-bit integers with a scale for each token and head, see
// caches/stored.py. Defines the names of stored_numbers.cuh. The tensor cores multiply the integers without their
// scales: the scale of a key multiplies its scores, the scale of a value its shares. The order of a head's numbers in
// the matrices is free as long as both operands agree, so a lane reads four neighbouring integers.
using Stored = int8_t;
constexpr int SCALE_BYTES = 2;
constexpr int LINE = SIZE * sizeof(Stored) + 16;
struct Scales {
  float key[2], share[2];
};
auto query_number = [&](int i) -> int { return 4 * quarter + 2 * i; };
// Numbers 4 * n and the next of each 16 are in columns 2 * n and the next, the two numbers after them in columns
// 8 + 2 * n and the next: a lane also has four neighbouring numbers of a key.
auto put_query = [&](char* line, int piece, const Some<N, 8>& some) {
  char* const to = line + piece / 2 * 32 + piece % 2 * 8;
  *(Some<N, 4>*)to = {some.n[0], some.n[1], some.n[4], some.n[5]};
  *(Some<N, 4>*)(to + 16) = {some.n[2], some.n[3], some.n[6], some.n[7]};
};
auto copy_scales = [&](unsigned keys_to, unsigned values_to, long at, int piece) {
  copy(keys_to + piece * 16, (const __nv_bfloat16*)key_scales + at + piece * 8);
  copy(values_to + piece * 16, (const __nv_bfloat16*)value_scales + at + piece * 8);
};
// `keys_at` and `values_at`: the places in shared memory of the scales of eight tokens from `token` on. The scales
// of values that no line sees become 0: they may be in memory that was never written.
auto scales_of = [&](unsigned keys_at, unsigned values_at, int token) -> Scales {
  const auto of_keys = *(const Some<__nv_bfloat16, 2>*)((const char*)space + keys_at + 4 * quarter);
  const auto of_values = *(const Some<__nv_bfloat16, 2>*)((const char*)space + values_at + 4 * quarter);
  Scales found;
  #pragma unroll
  for (int i = 0; i < 2; i++) {
    const int at = token + 2 * quarter + i;
    found.key[i] = up(of_keys.n[i]);
    found.share[i] = at < low || at >= last ? 0.f : up(of_values.n[i]) * SHARE_SCALE;
  }
  return found;
};
auto scale_scores = [&](float (&score)[4], const Scales& by) {
  #pragma unroll
  for (int i = 0; i < 4; i++) score[i] *= by.key[i % 2];
};
auto share_pair = [&](float left, float right, const Scales& by) -> unsigned {
  return pair(left * by.share[0], right * by.share[1], N());
};
const char* const key_lane = (const char*)space + row * LINE + 4 * quarter;
auto load_keys = [&](unsigned (&b)[4], unsigned at) {
  #pragma unroll
  for (int n = 0; n < 2; n++) {
    const unsigned four = four_integers(key_lane + at + n * 8 * LINE);
    b[2 * n] = pair(integer_at(four, 0), integer_at(four, 1), N());
    b[2 * n + 1] = pair(integer_at(four, 2), integer_at(four, 3), N());
  }
};
constexpr int VALUE_MATRICES = 4;
const char* const value_lane = (const char*)space + 2 * quarter * LINE + 4 * row;
auto load_values = [&](unsigned (&b)[8], unsigned at) {
  unsigned four[4];
  #pragma unroll
  for (int n = 0; n < 4; n++) four[n] = four_integers(value_lane + at + (n % 2 + n / 2 * 8) * LINE);
  #pragma unroll
  for (int j = 0; j < 4; j++) {
    b[2 * j] = pair(integer_at(four[0], j), integer_at(four[1], j), N());
    b[2 * j + 1] = pair(integer_at(four[2], j), integer_at(four[3], j), N());
  }
};
auto put_output = [&](N* to, const float (&sum)[SIZE / 8][4], int half, float factor) {
  factor /= SHARE_SCALE;
  #pragma unroll
  for (int c = 0; c < SIZE / 32; c++)
    #pragma unroll
    for (int i = 0; i < 2; i++) {
      const int n = 2 * half + i;
      *(uint2*)(to + c * 32 + (2 * quarter + i) * 4)
          = {pair(sum[4 * c][n] * factor, sum[4 * c + 1][n] * factor, N()),
             pair(sum[4 * c + 2][n] * factor, sum[4 * c + 3][n] * factor, N())};
    }
};
auto put_sums = [&](float* to, const float (&sum)[SIZE / 8][4], int half) {
  #pragma unroll
  for (int c = 0; c < SIZE / 32; c++)
    #pragma unroll
    for (int i = 0; i < 2; i++) {
      Some<float, 4> some;
      #pragma unroll
      for (int j = 0; j < 4; j++) some.n[j] = sum[4 * c + j][2 * half + i] / SHARE_SCALE;
      *(Some<float, 4>*)(to + c * 32 + (2 * quarter + i) * 4) = some;
    }
};
// Two warps have the key and the value.
auto store_fresh = [&](long at, auto key, auto value) {
  if (warp < 2) {
    constexpr int EACH = SIZE / 32;
    float numbers[EACH];
    #pragma unroll
    for (int n = 0; n < EACH; n++) numbers[n] = up(warp == 0 ? key(lane * EACH + n) : value(lane * EACH + n));
    store_integers<EACH>(numbers, (int8_t*)(warp == 0 ? keys : values) + at * SIZE,
                         (__nv_bfloat16*)(warp == 0 ? key_scales : value_scales) + at);
  }
};

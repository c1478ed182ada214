// As rotate_and_write.cu, but keys and values are stored as integers with a scale for each token and head.
// A warp has a head of a line; each of its lanes has neighbouring numbers.
constexpr int EACH = SIZE / 32, HALF = TURNED > 0 ? TURNED / 2 : 1, QUERIES = HEADS * GROUP;
const int which = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32, line = blockIdx.y;
if (which < QUERIES + 2 * HEADS) {
  const long slot = slots[line];
  const bool is_query = which < QUERIES, is_value = which >= QUERIES + HEADS;
  const int head = is_query ? which : is_value ? which - QUERIES - HEADS : which - QUERIES;
  const N* const from = is_query   ? (const N*)q + line * q_strides[0] + head * q_strides[1]
                        : is_value ? (const N*)v + line * v_strides[0] + head * v_strides[1]
                                   : (const N*)k + line * k_strides[0] + head * k_strides[1];
  const long stride = is_query ? q_strides[2] : is_value ? v_strides[2] : k_strides[2];
  const float* const cosine = (const float*)cosines + (long)line * HALF;
  const float* const sine = (const float*)sines + (long)line * HALF;
  float numbers[EACH];
  #pragma unroll
  for (int n = 0; n < EACH; n++) {
    const int d = lane * EACH + n;
    N rounded;  // like numbers that are not quantised
    const float number = slot < 0   ? 0.f
                         : is_value ? up(from[d * stride])
                                    : rotated<N, TURNED, TRADITIONAL>(from, stride, d, cosine, sine);
    down(number, &rounded);
    if (is_query) ((N*)out)[((long)line * QUERIES + head) * SIZE + d] = rounded;
    numbers[n] = up(rounded);
  }
  if (!is_query && slot >= 0) {
    const long at = (slot / BLOCK * HEADS + head) * BLOCK + slot % BLOCK;
    store_integers<EACH>(numbers, (int8_t*)(is_value ? values : keys) + at * SIZE,
                         (__nv_bfloat16*)(is_value ? value_scales : key_scales) + at);
  }
}

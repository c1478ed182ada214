// Keys and values that are stored as numbers of type N, which are multiplied without conversion. This file or
// stored_integers.cuh, which defines the same names, comes before the tiles of ragged_attention.cu.
using Stored = N;
constexpr int SCALE_BYTES = 0;  // of a head of a token
constexpr int LINE = SIZE * sizeof(Stored) + 16;  // bytes between heads in shared memory
struct Scales {};  // the scales of two neighbouring keys and their values
// Columns 2 * quarter and the next of half i of 16 columns of queries have this number and the next of 16.
auto query_number = [&](int i) -> int { return i * 8 + 2 * quarter; };
// Puts numbers 8 * piece and the next seven of a query into its line of shared memory.
auto put_query = [&](char* line, int piece, const Some<N, 8>& some) {
  *(Some<N, 8>*)(line + piece * 16) = some;
};
// Copies the scales of keys and values, a piece of eight tokens.
auto copy_scales = [&](unsigned keys_to, unsigned values_to, long at, int piece) {};
auto scales_of = [&](unsigned keys_at, unsigned values_at, int token) -> Scales { return {}; };
auto scale_scores = [&](float (&score)[4], const Scales& by) {};
auto share_pair = [&](float left, float right, const Scales& by) -> unsigned { return pair(left, right, N()); };
// Loads 16 numbers of 16 keys: b[0] and b[1] are the operands of mma for the first eight keys.
const unsigned key_lane = shared_address(space) + (lane / 16 * 8 + lane % 8) * LINE + lane / 8 % 2 * 16;
auto load_keys = [&](unsigned (&b)[4], unsigned at) { load_matrices(b, key_lane + at); };
// Loads 32 bytes of 16 values: b[2 * j] and the next are the operands for matrix j of the sums.
constexpr int VALUE_MATRICES = 2;
const unsigned value_lane = shared_address(space) + lane % 16 * LINE + lane / 16 * 16;
auto load_values = [&](unsigned (&b)[4], unsigned at) { load_transposed(b, value_lane + at); };
// Writes a lane's sums of a row, times a factor, or unchanged for part_sums.cuh.
auto put_output = [&](N* to, const float (&sum)[SIZE / 8][4], int half, float factor) {
  #pragma unroll
  for (int j = 0; j < SIZE / 8; j++)
    *(unsigned*)(to + 8 * j + 2 * quarter)
        = pair(sum[j][2 * half] * factor, sum[j][2 * half + 1] * factor, N());
};
auto put_sums = [&](float* to, const float (&sum)[SIZE / 8][4], int half) {
  #pragma unroll
  for (int j = 0; j < SIZE / 8; j++)
    *(Some<float, 2>*)(to + 8 * j + 2 * quarter) = {sum[j][2 * half], sum[j][2 * half + 1]};
};
// Stores numbers key(d) and value(d) of a head in slot `at`; all threads call it.
auto store_fresh = [&](long at, auto key, auto value) {
  #pragma unroll 1
  for (int i = thread; i < 2 * SIZE; i += THREADS) {
    const int d = i % SIZE;
    if (i < SIZE)
      ((N*)keys)[at * SIZE + d] = key(d);
    else
      ((N*)values)[at * SIZE + d] = value(d);
  }
};

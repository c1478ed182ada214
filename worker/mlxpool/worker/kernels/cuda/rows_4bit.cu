// Rows of an affine 4-bit weight in tiles, dequantised: line t of `out` is row ids[t], or with ALL row t.
// A thread makes eight neighbouring numbers of a row, with ALL also of the row 8 rows further, which are in
// the same words.
constexpr int HALVES = ALL ? 2 : 1;
const int STEPS = tiles_shape[1], PIECES = STEPS * 8;
const long count = (ALL ? (long)tiles_shape[0] * 32 : (long)ids_shape[0]) * PIECES;
const long at = (long)blockIdx.x * blockDim.x + threadIdx.x;
if (at < count) {
  const int piece = at % PIECES, j = piece % 8 / 2;
  const long line = at / PIECES, row = ALL ? line / 8 * 16 + line % 8 : (long)ids[line];
  const char* const from = (const char*)tiles + fragment_offset(row / 16, piece / 8, STEPS);
  unsigned words[4];
  #pragma unroll
  for (int quarter = 0; quarter < 4; quarter++)
    words[quarter] = ((const unsigned*)from)[(row % 8 * 4 + quarter) * 4 + j];
  const Some<N, 4> factors = *(const Some<N, 4>*)(from + 512 + (row % 8 * GROUPS + j * 16 / GROUP) * 8);
  #pragma unroll
  for (int half = 0; half < HALVES; half++) {
    const int low = ALL ? half : row % 16 / 8;
    const float scale = up(low ? factors.n[1] : factors.n[0]), bias = up(low ? factors.n[3] : factors.n[2]);
    Some<N, 8> numbers;
    #pragma unroll
    for (int i = 0; i < 8; i++) {
      const int shift = 4 * (piece % 2 * 2 + low) + i % 2 * 16;
      down((float)(words[i / 2] >> shift & 15) * scale + bias, &numbers.n[i]);
    }
    *(Some<N, 8>*)((N*)out + ((ALL ? row + half * 8 : line) * PIECES + piece) * 8) = numbers;
  }
}

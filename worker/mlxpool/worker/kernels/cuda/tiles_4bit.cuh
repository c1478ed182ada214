// An affine 4-bit weight [rows, columns] in tiles of 64 x 64 numbers, one row of tiles after the other. A tile
// is four fragments of 16 rows, each of them contiguous: the words of 32 lanes, four each, then the scales and
// biases. They are in the order of the first operand of a product in tensor cores: lane l has numbers of rows
// l / 4 and l / 4 + 8, in its word j of columns 16 * j + l % 4 * 2, the next one, and those 8 columns further:
// nibbles p and p + 4 are neighbours of row l / 4 + p % 2 * 8 and columns + p / 2 * 8. After the words, each of
// the first eight rows has, for each group, its scale, the scale of the row 8 rows further, and both biases.
constexpr int GROUPS = 64 / GROUP;  // of a row in a tile
constexpr int FRAGMENT = 512 + 64 * GROUPS;  // bytes
// The offset in bytes of a fragment, the `row`-th of 16 rows, in a weight with `steps` tiles in a row of them.
__device__ inline long fragment_offset(int row, int step, int steps) {
  return (((long)(row / 4) * steps + step) * 4 + row % 4) * FRAGMENT;
}

// Puts quantised weights of experts, in MLX's layout [EXPERTS, ROWS, columns], into the order of expert_fragments.cuh.
// GATED: the first half of an expert's rows are gates; a fragment has eight gates and the eight ups that belong to
// them. A thread makes a word.
constexpr int ALL_WORDS = FRAGMENT / 4, NUMBERS = 32 / BITS;
const int COLUMNS = weight_shape[2] * NUMBERS, ROWS = weight_shape[1], STEPS = COLUMNS / 64;
const long at = (long)blockIdx.x * blockDim.x + threadIdx.x, fragment = at / ALL_WORDS;
if (fragment < (long)weight_shape[0] * (ROWS / 16) * STEPS) {
  const int word = at % ALL_WORDS, step = fragment % STEPS;
  const long expert = fragment / STEPS / (ROWS / 16);
  const int strip = fragment / STEPS % (ROWS / 16);
  auto row_of = [&](int row) -> long {  // of the fragment's 16
    return expert * ROWS + (GATED ? strip * 8 + row % 8 + row / 8 * (ROWS / 2) : strip * 16 + row);
  };
  auto number = [&](int row, int column) -> unsigned {
    const long place = row_of(row) * COLUMNS + step * 64 + column;
    return ((const unsigned*)weight)[place / NUMBERS] >> place % NUMBERS * BITS & (1u << BITS) - 1;
  };
  unsigned made = 0;
  if (word < WORDS / 4) {
    const int lane = word / 4 % 32, row = lane / 4, column = lane % 4 * 2;
    if (BITS == 8) {
      const int part = word / 128 * 4 + word % 4;  // two for 16 columns
      for (int i = 0; i < 4; i++) made |= number(row + i / 2 * 8, part * 8 + column + i % 2) << 8 * i;
    } else {
      for (int p = 0; p < 4; p++) {
        const int from = word % 4 * 16 + p / 2 * 8 + column;
        const unsigned low = number(row + p % 2 * 8, from), high = number(row + p % 2 * 8, from + 1);
        if (FLOATS) {
          const unsigned both = low << 12 & 0x8000 | (low & 7) << 6 | high << 28 & 0x80000000 | (high & 7) << 22;
          const unsigned upper = p == 3 ? UPPER : 0;
          made |= turned(both & ~upper, (32 - TURNS[p]) % 32) | turned(both & upper, 32 - TURNS[4]);
        } else {
          made |= low << 4 * p | high << 4 * p + 16;
        }
      }
    }
  } else if (FLOATS) {
    const int row = word - WORDS / 4;
    for (int i = 0; i < 4; i++) {
      const long place = row_of(row + i % 2 * 8) * (COLUMNS / GROUP) + step * FRAGMENT_GROUPS + i / 2;
      made |= (unsigned)((const unsigned char*)scales)[place] << 8 * i;
    }
  } else {
    const int i = word - WORDS / 4, row = i / 2 / FRAGMENT_GROUPS, group = step * FRAGMENT_GROUPS + i / 2 % FRAGMENT_GROUPS;
    const N* const from = i % 2 ? (const N*)biases : (const N*)scales;
    const long groups = COLUMNS / GROUP;
    const Some<N, 2> two = {from[row_of(row) * groups + group], from[row_of(row + 8) * groups + group]};
    made = *(const unsigned*)&two;
  }
  ((unsigned*)out)[at] = made;
}

// Puts an affine 4-bit weight [rows, columns / 8] and its scales and biases [rows, columns / GROUP] into the
// order of tiles_4bit.cuh. A thread makes a word.
constexpr int WORDS = FRAGMENT / 4;
const int IN = weight_shape[1] * 8, STEPS = IN / 64;
const long at = (long)blockIdx.x * blockDim.x + threadIdx.x, fragment = at / WORDS;
if (at < (long)weight_shape[0] / 16 * STEPS * WORDS) {
  const int word = at % WORDS, step = fragment / 4 % STEPS;
  const long row = (fragment / 4 / STEPS * 4 + fragment % 4) * 16;
  unsigned made = 0;
  if (word < 128) {
    const int lane = word / 4, j = word % 4;
    #pragma unroll
    for (int p = 0; p < 4; p++) {
      const long source = (row + lane / 4 + p % 2 * 8) * (IN / 8) + step * 8 + j * 2 + p / 2;
      const unsigned both = ((const unsigned*)weight)[source] >> lane % 4 * 8;
      made |= (both & 15) << 4 * p | (both >> 4 & 15) << 4 * p + 16;
    }
  } else {
    const int i = word - 128, group = i / 2 % GROUPS;
    const N* const from = i % 2 ? (const N*)biases : (const N*)scales;
    const long source = (row + i / 2 / GROUPS) * (IN / GROUP) + step * GROUPS + group;
    Some<N, 2> two = {from[source], from[source + (long)8 * (IN / GROUP)]};
    made = *(unsigned*)&two;
  }
  ((unsigned*)out)[at] = made;
}

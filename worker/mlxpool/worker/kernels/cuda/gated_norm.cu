// The gated norm of each head of each line, see gated_norm.cuh. One warp for a head of a line.
const int lane = threadIdx.x & 31;
const int number = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
if (number < x_shape[0] * HEADS) {
  const long line = number / HEADS, head = number % HEADS;
  gated_norm<VALUE>(x + (long)number * VALUE, (const N*)lines + line * LINE + GATES + head * VALUE, gain,
                    NORM_EPS, (N*)out + (long)number * VALUE, lane);
}

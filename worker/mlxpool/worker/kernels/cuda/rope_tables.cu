// Cosines and sines of positions times angular frequencies, one of each a thread.
const long at = (long)blockIdx.x * blockDim.x + threadIdx.x;
if (at < (long)positions_shape[0] * HALF) {
  const float angle = (float)positions[at / HALF] * SCALE * turns[at % HALF];
  cosines[at] = cosf(angle) * GAIN;
  sines[at] = sinf(angle) * GAIN;
}

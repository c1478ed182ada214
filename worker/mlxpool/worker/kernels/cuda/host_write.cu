// Copies numbers of 4 bytes to an array that the host addresses, too.
const int at = blockIdx.x * blockDim.x + threadIdx.x;
if (at < numbers_shape[0]) {
  ((unsigned*)shared_numbers)[at] = ((const unsigned*)numbers)[at];
}
if (at == 0) done[0] = 0;

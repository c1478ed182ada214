// The address of an array of DIMS dimensions, and the numbers between neighbours of its last two.
if (threadIdx.x == 0) {
  found[0] = (long long)x;
  found[1] = x_strides[DIMS - 1];
  found[2] = DIMS > 1 ? x_strides[DIMS - 2] : 0;
}

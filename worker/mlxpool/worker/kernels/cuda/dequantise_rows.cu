// Rows of an affine weight, dequantised: line t of `out` is row ids[t]. A thread makes eight numbers.
const long i = (long)blockIdx.x * blockDim.x + threadIdx.x;
const long pieces = (long)scales_shape[1] * (GROUP / 8);  // of a row
if (i < ids_shape[0] * pieces) {
  const long at = ids[i / pieces] * pieces + i % pieces;
  const long group = at / (GROUP / 8);
  ((Some<N, 8>*)out)[i] =
      unpacked<BITS, N>(packed_numbers<BITS>(weight, at), up(scales[group]), up(biases[group]));
}

// Adds two vectors of SIZE numbers and divides the sum by its root mean square; one vector a block.
constexpr int EACH = 8;
const long line = (long)blockIdx.x * SIZE;
const int at = threadIdx.x * EACH;
Some<N, EACH> sum;
float squares = 0;
if (at < SIZE) {
  Some<N, EACH> a = *(const Some<N, EACH>*)((const N*)x + line + at);
  Some<N, EACH> b = *(const Some<N, EACH>*)((const N*)y + line + at);
  #pragma unroll
  for (int i = 0; i < EACH; i++) {
    down(up(a.n[i]) + up(b.n[i]), &sum.n[i]);
    float one = up(sum.n[i]);
    squares += one * one;
  }
  *(Some<N, EACH>*)((N*)added + line + at) = sum;
}
__shared__ float parts[32];
#pragma unroll
for (int o = 16; o > 0; o >>= 1) squares += __shfl_xor_sync(0xffffffff, squares, o);
if ((threadIdx.x & 31) == 0) parts[threadIdx.x >> 5] = squares;
__syncthreads();
float all = 0;
for (int w = 0; w < THREADS / 32; w++) all += parts[w];
const float factor = rsqrtf(all / SIZE + EPS);
if (at < SIZE) {
  Some<N, EACH> w = *(const Some<N, EACH>*)((const N*)weight + at), result;
  #pragma unroll
  for (int i = 0; i < EACH; i++) {
    N rounded;
    down(up(sum.n[i]) * factor, &rounded);
    down(up(rounded) * up(w.n[i]), &result.n[i]);
  }
  *(Some<N, EACH>*)((N*)normed + line + at) = result;
}

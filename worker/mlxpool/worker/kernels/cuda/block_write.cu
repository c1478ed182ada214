// Writes the fresh tokens into their slots of the pool.
long at = (long)blockIdx.x * blockDim.x + threadIdx.x;
if (at < (long)slots_shape[0] * HEADS * SIZE) {
  int d = at % SIZE, head = (at / SIZE) % HEADS;
  long slot = slots[at / (SIZE * HEADS)];
  N* to = (N*)pool + ((slot / BLOCK * HEADS + head) * BLOCK + slot % BLOCK) * SIZE;
  to[d] = ((const N*)fresh)[at];
}
if (at == 0) done[0] = 0;

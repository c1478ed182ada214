// As peer_sum.cu, for many bytes: a thread block writes a chunk of x to the peers and then a flag, and
// while the chunk is under way it adds up the chunk before. Each area has MAX_CHUNKS flags, whatever UNROLL is:
// the next sums may have another UNROLL, and their flags may come while these are read.
Peers peers(places, watch);
constexpr int EACH = 16 / sizeof(N), CHUNK = THREADS * UNROLL;
const long count = (long)x_shape[0] * WIDTH, pieces = (count + EACH - 1) / EACH;
const int chunks = (pieces + CHUNK - 1) / CHUNK;
const unsigned long tag = peers.tag(2 * pieces + JOINS);
constexpr long FLAGS = 2l * (RANKS - 1) * PIECES * 16;  // the beginning of the flags in a buffer
int before = -1;
for (int chunk = blockIdx.x;; chunk += gridDim.x) {
  if (chunk < chunks) {
    #pragma unroll
    for (int i = 0; i < UNROLL; i++) {
      const long piece = (long)chunk * CHUNK + i * THREADS + threadIdx.x;
      if (piece >= pieces || peers.lost) continue;
      const Piece<N> own = loaded<N>(x, piece, count);
      #pragma unroll
      for (int peer = 0; peer < RANKS; peer++) {
        if (peer == peers.rank) continue;
        char* const area = peers.buffer(peer) + OFFSET + peers.area<RANKS>(peer, peers.rank) * PIECES * 16;
        ((uint4*)area)[piece] = {(unsigned)own.words[0], (unsigned)(own.words[0] >> 32),
                                 (unsigned)own.words[1], (unsigned)(own.words[1] >> 32)};
      }
    }
  }
  __syncthreads();
  const int peer = threadIdx.x;
  const bool tells = peer < RANKS && peer != peers.rank;
  if (tells && chunk < chunks && !peers.lost) {
    unsigned long* const flags = (unsigned long*)(peers.buffer(peer) + OFFSET + FLAGS);
    release_flag(flags + peers.area<RANKS>(peer, peers.rank) * MAX_CHUNKS + chunk, tag);
  }
  if (before >= 0) {
    if (tells) {
      const unsigned long* const flags = (const unsigned long*)(peers.buffer(peers.rank) + OFFSET + FLAGS);
      int polls = 0;
      long since = 0;
      while (!peers.lost && acquired_flag(flags + peers.area<RANKS>(peers.rank, peer) * MAX_CHUNKS + before) != tag)
        peers.gives_up(peer, polls, since);
    }
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < UNROLL; i++) {
      const long piece = (long)before * CHUNK + i * THREADS + threadIdx.x;
      if (piece >= pieces) continue;
      Sum<N> sum;
      #pragma unroll
      for (int from = 0; from < RANKS; from++) {
        Piece<N> part;
        if (from == peers.rank) {
          part = loaded<N>(x, piece, count);
        } else {
          const char* const area = peers.buffer(peers.rank) + OFFSET + peers.area<RANKS>(peers.rank, from) * PIECES * 16;
          const uint4 all = __ldcg((const uint4*)area + piece);
          part.words[0] = (unsigned long)all.y << 32 | all.x;
          part.words[1] = (unsigned long)all.w << 32 | all.z;
        }
        if (JOINS) {
          constexpr int OF_LINE = JOINS ? WIDTH / EACH : 1;
          stored(out, (piece / OF_LINE * RANKS + from) * OF_LINE + piece % OF_LINE, count * RANKS, part);
        } else {
          sum.add(part);
        }
      }
      if (ADDS) sum.add(loaded<N>(residual, piece, count));
      if (!JOINS) stored(out, piece, count, sum.rounded());
    }
  }
  if (chunk >= chunks) break;
  before = chunk;
}
peers.end();

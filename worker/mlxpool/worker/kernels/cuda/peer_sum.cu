// The sum of x over all ranks, or with JOINS their columns beside each other, for few bytes: 8 bytes of data
// and a tag are one word, which arrives whole, so that data needs no flag after it and no fence before it.
// A thread has two words of x, 16 bytes. The first words of all threads are neighbours, and the second words
// follow them. With ADDS the numbers of `residual` are added to the sum.
Peers peers(places, watch);
constexpr int EACH = 16 / sizeof(N);
const long count = (long)x_shape[0] * WIDTH, pieces = (count + EACH - 1) / EACH;
const long piece = (long)blockIdx.x * THREADS + threadIdx.x;
const unsigned long tag = peers.tag(2 * pieces + JOINS);
if (piece < pieces) {
  const Piece<N> own = loaded<N>(x, piece, count);
  Piece<N> beside;
  if (ADDS) beside = loaded<N>(residual, piece, count);
  #pragma unroll
  for (int peer = 0; peer < RANKS; peer++) {
    if (peer == peers.rank || peers.lost) continue;
    char* const to = peers.buffer(peer) + (peers.area<RANKS>(peer, peers.rank) * 2 * PIECES + piece) * 16;
    store_word(to, own.words[0], tag);
    store_word(to + PIECES * 16l, own.words[1], tag);
  }
  Sum<N> sum;
  #pragma unroll
  for (int from = 0; from < RANKS; from++) {
    Piece<N> part = own;
    if (from != peers.rank) {
      const char* const at =
          peers.buffer(peers.rank) + (peers.area<RANKS>(peers.rank, from) * 2 * PIECES + piece) * 16;
      int polls = 0;
      long since = 0;
      #pragma unroll
      for (int i = 0; i < 2; i++) {
        unsigned long found = ~tag;
        while (!peers.lost) {
          load_word(at + PIECES * 16l * i, part.words[i], found);
          if (found == tag || peers.gives_up(from, polls, since)) break;
        }
      }
    }
    if (JOINS) {
      constexpr int OF_LINE = JOINS ? WIDTH / EACH : 1;
      stored(out, (piece / OF_LINE * RANKS + from) * OF_LINE + piece % OF_LINE, count * RANKS, part);
    } else {
      sum.add(part);
    }
  }
  if (ADDS) sum.add(beside);
  if (!JOINS) stored(out, piece, count, sum.rounded());
}
peers.end();

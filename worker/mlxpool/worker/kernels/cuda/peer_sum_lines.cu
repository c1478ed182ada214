// As peer_sum.cu, for many bytes: 128 bytes that 8 lanes of a warp write at once are one line, which arrives
// whole over NVLink: 120 bytes of data and the tag, so that data needs no flag after it and no fence before it.
// Eight lanes have LINES lines, which are OF_GROUP pieces of x: each of the first seven lanes has a piece in each
// line, and the last lane has half of a piece beside the tag. A warp has a portion of four such groups. It writes
// the next portion before it waits for the current one.
Peers peers(places, watch);
constexpr int EACH = 16 / sizeof(N), WARPS = THREADS / 32;
constexpr int OF_GROUP = 7 * LINES + LINES / 2;
constexpr long OF_PORTION = 4 * OF_GROUP, PORTION_BYTES = LINES * 512l;
const long count = (long)x_shape[0] * WIDTH, pieces = (count + EACH - 1) / EACH;
const long portions = (pieces + OF_PORTION - 1) / OF_PORTION, stride = (long)gridDim.x * WARPS;
const unsigned long tag = peers.tag(2 * pieces + JOINS);
const int lane = threadIdx.x % 32, column = lane % 8;
const bool tagged = column == 7;
// The piece of this lane in line i of a portion; its first word is in line i, the second too or in line i + 1.
auto piece_of = [&](long portion, int i) {
  return portion * OF_PORTION + lane / 8 * OF_GROUP + (tagged ? 7 * LINES + i / 2 : 7 * i + column);
};
auto area = [&](int at, int from) {
  return peers.buffer(at) + OFFSET + peers.area<RANKS>(at, from) * AREA + lane * 16;
};
// Writes a portion to the peers, and keeps this lane's pieces of it.
auto send = [&](long portion, Piece<N> (&own)[LINES]) {
  #pragma unroll
  for (int i = 0; i < LINES; i++) {
    const long piece = piece_of(portion, i);
    own[i].words[0] = own[i].words[1] = 0;
    if (piece < pieces) own[i] = loaded<N>(x, piece, count);
  }
  #pragma unroll
  for (int peer = 0; peer < RANKS; peer++) {
    if (peer == peers.rank || peers.lost) continue;
    char* const to = area(peer, peers.rank) + portion * PORTION_BYTES;
    #pragma unroll
    for (int i = 0; i < LINES; i++)
      store_line(to + i * 512, tagged, tagged ? own[i].words[i % 2] : own[i].words[0], tagged ? tag : own[i].words[1]);
  }
};
long portion = (long)blockIdx.x * WARPS + threadIdx.x / 32;
Piece<N> own[LINES], next[LINES];
if (portion < portions) send(portion, own);
for (; portion < portions; portion += stride) {
  if (portion + stride < portions) send(portion + stride, next);
  unsigned long words[RANKS - 1][LINES][2];  // of the peers, in the order of ranks
  #pragma unroll
  for (int other = 0; other < RANKS - 1; other++) {
    const int from = other + (other >= peers.rank);
    const char* const at = area(peers.rank, from) + portion * PORTION_BYTES;
    int polls = 0;
    long since = 0;
    while (!peers.lost) {
      bool here = true;
      #pragma unroll
      for (int i = 0; i < LINES; i++) here &= load_line(at + i * 512, tagged, tag, words[other][i]);
      if (__all_sync(0xffffffffu, here)) break;
      peers.lost = __any_sync(0xffffffffu, peers.gives_up(from, polls, since));
    }
  }
  #pragma unroll
  for (int i = 0; i < LINES; i++) {
    const long piece = piece_of(portion, i);
    if (piece >= pieces || (tagged && i % 2)) continue;
    Sum<N> sum;
    #pragma unroll
    for (int from = 0; from < RANKS; from++) {
      Piece<N> part = own[i];
      if (from != peers.rank) {
        const auto& theirs = from < peers.rank ? words[min(from, RANKS - 2)] : words[max(from - 1, 0)];
        part.words[0] = theirs[i][0];
        part.words[1] = tagged ? theirs[i | 1][0] : theirs[i][1];
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
  #pragma unroll
  for (int i = 0; i < LINES; i++) own[i] = next[i];
}
peers.end();

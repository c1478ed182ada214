// The memory that the ranks of a group share for sums over their GPUs; see groups/peer_sums.py.
//
// Each rank has a buffer, which the others write. It has two halves; a sum uses the half of its epoch, the
// number of the sum. A rank is in epoch e + 1 when it has seen each peer there or beyond, and then each peer
// has read all of epoch e: so e + 2 may overwrite its half, and one exchange a sum is enough.
//
// A buffer begins with its rank's own state: the epoch before, thread blocks that have ended, whether a peer
// is lost. `places` are the rank, the bound of a wait in nanoseconds, and the addresses of all ranks' buffers.
// `watch` is memory of the host. A kernel writes 1 + the rank of a lost peer there, and never reads it: the
// reads of all waiting warps would follow each other over PCIe, in 0.6 us each, also after the data has come.
// When a peer is lost, this rank writes nothing to others any more: no sum of wrong numbers leaves it,
// and its results do not count.
enum { EPOCH, ARRIVED, LOST };
enum { RANK, BOUND, BUFFERS };
constexpr int STATE_BYTES = 256;  // of a buffer, before the halves that peers write
constexpr int TAG_BITS = 24;  // of a tag, below the epoch: the kind of the sum, so that unlike sums never match
constexpr int POLLS = 64;  // between two looks at the clock

template <typename N> struct Summed { using T = float; };
template <> struct Summed<int> { using T = int; };
__device__ inline int up(int x) { return x; }
__device__ inline void down(int x, int* to) { *to = x; }

// 16 bytes of numbers.
template <typename N> union Piece {
  unsigned long words[2];
  N n[16 / sizeof(N)];
};

struct Peers {
  const long* places;
  long* state;
  int* watch;
  long epoch, rank;
  bool lost;

  __device__ Peers(const void* of_ranks, const void* of_host) : places((const long*)of_ranks), watch((int*)of_host) {
    rank = places[RANK];
    state = (long*)places[BUFFERS + rank];
    epoch = state[EPOCH] + 1;
    lost = state[LOST];
  }
  __device__ char* buffer(int of) const { return (char*)places[BUFFERS + of] + STATE_BYTES; }
  __device__ unsigned long tag(long size) const {
    return (unsigned long)epoch << TAG_BITS | (unsigned long)size & (1ul << TAG_BITS) - 1;
  }
  // The number of the area in the buffer of `at` that rank `from` writes in this epoch.
  template <int RANKS> __device__ long area(int at, int from) const {
    return epoch % 2 * (RANKS - 1) + (from < at ? from : from - 1);
  }
  // Counts one poll of a wait for `peer`. True: the wait is over, because the peer is lost.
  __device__ bool gives_up(int peer, int& polls, long& since) {
    next_poll();
    if (++polls % POLLS) return false;
    if (((volatile long*)state)[LOST]) return lost = true;
    const long now = nanoseconds();
    if (since == 0) since = now;
    if (now - since <= places[BOUND]) return false;
    ((volatile long*)state)[LOST] = 1;
    *(volatile int*)watch = peer + 1;
    return lost = true;
  }
  // The end of a thread block, with all its threads: the last one ends the epoch.
  __device__ void end() {
    __syncthreads();
    if (threadIdx.x != 0) return;
    if (atomicAdd((unsigned long long*)state + ARRIVED, 1ull) != gridDim.x - 1) return;
    state[ARRIVED] = 0;
    state[EPOCH] = epoch;
  }
};

// The numbers of a piece of an array of `count` numbers; zeros after the last.
template <typename N> __device__ inline Piece<N> loaded(const void* from, long piece, long count) {
  constexpr int EACH = 16 / sizeof(N);
  Piece<N> found;
  if ((piece + 1) * EACH <= count) {
    const uint4 all = ((const uint4*)from)[piece];
    found.words[0] = (unsigned long)all.y << 32 | all.x;
    found.words[1] = (unsigned long)all.w << 32 | all.z;
    return found;
  }
  found.words[0] = found.words[1] = 0;
  for (int i = 0; piece * EACH + i < count; i++) found.n[i] = ((const N*)from)[piece * EACH + i];
  return found;
}
template <typename N> __device__ inline void stored(void* to, long piece, long count, const Piece<N>& numbers) {
  constexpr int EACH = 16 / sizeof(N);
  if ((piece + 1) * EACH <= count) {
    ((uint4*)to)[piece] = {(unsigned)numbers.words[0], (unsigned)(numbers.words[0] >> 32),
                           (unsigned)numbers.words[1], (unsigned)(numbers.words[1] >> 32)};
    return;
  }
  for (int i = 0; piece * EACH + i < count; i++) ((N*)to)[piece * EACH + i] = numbers.n[i];
}

// The sum of one piece in the order of the ranks, so that all ranks get the same bits.
template <typename N> struct Sum {
  typename Summed<N>::T numbers[16 / sizeof(N)] = {};
  __device__ void add(const Piece<N>& part) {
    #pragma unroll
    for (int i = 0; i < 16 / (int)sizeof(N); i++) numbers[i] += up(part.n[i]);
  }
  __device__ Piece<N> rounded() const {
    Piece<N> found;
    #pragma unroll
    for (int i = 0; i < 16 / (int)sizeof(N); i++) down(numbers[i], &found.n[i]);
    return found;
  }
};

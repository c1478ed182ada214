// Rotates the queries and keys of a step's lines, writes keys and values into their slots of the pool,
// and returns the queries. Lines without a slot (-1) write nothing; their queries are zeros. A thread
// has two vectors of EACH numbers of a head: two that rotate with each other, or two that are copied.
constexpr int HALF = TURNED / 2, PIECES = SIZE / (2 * EACH);  // PIECES: threads of a head
constexpr int QUERIES = HEADS * GROUP, ALL = (QUERIES + 2 * HEADS) * PIECES;
using Vector = Some<N, EACH>;
using Factors = Some<float, EACH>;
const int i = blockIdx.x * blockDim.x + threadIdx.x, line = blockIdx.y;
if (i < ALL) {
  const long slot = slots[line];
  const int which = i / PIECES, piece = i % PIECES;
  const bool is_query = which < QUERIES, is_value = which >= QUERIES + HEADS;
  const int head = is_query ? which : is_value ? which - QUERIES - HEADS : which - QUERIES;
  const bool turns = !is_value && piece < HALF / EACH;
  const bool apart = turns && !TRADITIONAL;
  // The beginnings of both vectors in the head. Vectors of values, and vectors that do not rotate, are neighbours.
  const int one = apart ? piece * EACH : 2 * piece * EACH;
  const int two = apart ? one + HALF : one + EACH;
  const N* const from = is_query   ? (const N*)q + line * q_strides[0] + head * q_strides[1]
                        : is_value ? (const N*)v + line * v_strides[0] + head * v_strides[1]
                                   : (const N*)k + line * k_strides[0] + head * k_strides[1];
  const long stride = is_query ? q_strides[2] : is_value ? v_strides[2] : k_strides[2];
  auto load = [&](int at) -> Vector {
    const N* const place = from + at * stride;
    if (stride == 1 && (unsigned long long)place % sizeof(Vector) == 0) return *(const Vector*)place;
    Vector some;
    #pragma unroll
    for (int n = 0; n < EACH; n++) some.n[n] = place[n * stride];
    return some;
  };
  N* to = (N*)out + ((long)line * QUERIES + head) * SIZE;
  if (!is_query)
    to = (is_value ? (N*)values : (N*)keys) + ((slot / BLOCK * HEADS + head) * BLOCK + slot % BLOCK) * SIZE;
  Vector x, y;
  if (slot >= 0) {
    x = load(one);
    y = load(two);
    if (turns) {
      const Factors cosine = *(const Factors*)(cosines + (long)line * HALF + piece * EACH);
      const Factors sine = *(const Factors*)(sines + (long)line * HALF + piece * EACH);
      #pragma unroll
      for (int n = 0; n < EACH; n++) {
        // Traditional: numbers 2 * n and 2 * n + 1 of both vectors rotate with each other.
        N* const first = !TRADITIONAL ? &x.n[n] : 2 * n < EACH ? &x.n[2 * n] : &y.n[2 * n - EACH];
        N* const second = !TRADITIONAL ? &y.n[n] : EACH > 1 ? first + 1 : &y.n[n];
        const float a = up(*first), b = up(*second);
        down(a * cosine.n[n] - b * sine.n[n], first);
        down(b * cosine.n[n] + a * sine.n[n], second);
      }
    }
  } else {
    #pragma unroll
    for (int n = 0; n < EACH; n++) {
      down(0.f, &x.n[n]);
      down(0.f, &y.n[n]);
    }
  }
  if (slot >= 0 || is_query) {
    *(Vector*)(to + one) = x;
    *(Vector*)(to + two) = y;
  }
}

// The gated delta rule over spans of tokens, with the convolution before it: see
// kernels/recurrent/gated_delta.py. A thread block has COLUMNS columns of the state [KEY, VALUE] of a head
// of a span. Its first SCANNERS warps hold the state in registers and go over the tokens one after the
// other, 8 columns a warp: each lane has KEY / PARTS rows of a column. Meanwhile PREPARERS warps make the
// queries, keys, values, decays and rates of the next TILE tokens. The sums of a token do not depend on how
// tokens are divided among spans, launches and thread blocks; they are written so that compilers keep their order.
constexpr int PARTS = 4, ROWS = KEY / PARTS, SCANNERS = COLUMNS / 8;
constexpr int KEYS = HEADS / RATIO * KEY, CHANNELS = 2 * KEYS + HEADS * VALUE, TAPS = WIDTH - 1;
constexpr int GATES = CHANNELS, RATES = GATES + HEADS * VALUE, DECAYS = RATES + HEADS, LINE = DECAYS + HEADS;
constexpr long TAP_NUMBERS = (long)TAPS * CHANNELS, STATE = TAP_NUMBERS + (long)HEADS * KEY * VALUE;
__shared__ float4 keys[2][TILE][KEY / 4], queries[2][TILE][KEY / 4];
__shared__ float values[2][TILE][COLUMNS], decays[2][TILE], rates[2][TILE];
__shared__ float found[GATED ? 2 : 1][GATED ? TILE : 1][GATED ? COLUMNS : 1];
const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, preparer = warp - SCANNERS;
const int slice = blockIdx.x, head = blockIdx.y, key_head = head / RATIO;
const int* const span = (const int*)plan + blockIdx.z * 6;
const int first = span[0], count = span[1], source = span[2];
const bool every = span[5];  // whether the state after each token is written, not only the last
const float* const held = source == 0 ? states0 : source == 1 ? states1 : source == 2 ? states2 : states3;
const float* const before = source < 0 ? nullptr : held + span[3] * STATE;
float* const written = after + span[4] * STATE;
// The input of the convolution at token t of the span, from -TAPS on.
auto input = [&](int t, int channel) -> float {
  if (t >= 0) return up(((const N*)lines)[(long)(first + t) * LINE + channel]);
  return before ? before[(TAPS + t) * (long)CHANNELS + channel] : 0.f;
};
// silu of the convolution of a channel at GROUP tokens.
auto convolve = [&](int begin, int channel, float (&mixed)[GROUP]) {
  float x[GROUP + TAPS];
  #pragma unroll
  for (int i = 0; i < GROUP + TAPS; i++) {
    const int t = begin + i - TAPS;
    if (i < TAPS) x[i] = input(t, channel);
    else x[i] = t < count ? up(((const N*)lines)[(long)(first + t) * LINE + channel]) : 0.f;
  }
  #pragma unroll
  for (int i = 0; i < GROUP; i++) mixed[i] = x[i] * conv[channel];
  #pragma unroll
  for (int tap = 1; tap < WIDTH; tap++) {
    const float weight = conv[tap * CHANNELS + channel];
    #pragma unroll
    for (int i = 0; i < GROUP; i++) mixed[i] = fmaf(x[i + tap], weight, mixed[i]);
  }
  #pragma unroll
  for (int i = 0; i < GROUP; i++) mixed[i] = silu(mixed[i]);
};
// Makes the scan's inputs of TILE tokens. A warp has GROUP tokens of the queries, keys or values at a time.
auto prepare = [&](int tile, int buffer) {
  for (int task = preparer; task < TILE / GROUP * 3; task += PREPARERS) {
    const int kind = task % 3, group = task / 3 * GROUP, begin = tile + group;
    if (begin >= count) continue;
    if (kind == 2) {
      #pragma unroll
      for (int j = 0; j < COLUMNS / 32; j++) {
        float mixed[GROUP];
        convolve(begin, 2 * KEYS + head * VALUE + slice * COLUMNS + j * 32 + lane, mixed);
        #pragma unroll
        for (int i = 0; i < GROUP; i++) values[buffer][group + i][j * 32 + lane] = mixed[i];
      }
      if (lane < GROUP && begin + lane < count) {
        const N* const line = (const N*)lines + (long)(first + begin + lane) * LINE;
        const float a = up(line[DECAYS + head]) + bias[head], b = up(line[RATES + head]);
        const float softplus = __fadd_rn(fmaxf(a, 0.f), log1pf(expf(-fabsf(a))));
        decays[buffer][group + lane] = expf(-expf(speed[head]) * softplus);
        rates[buffer][group + lane] = 1 / __fadd_rn(1, expf(-b));
      }
      continue;
    }
    float mixed[KEY / 32][GROUP], squares[GROUP];
    #pragma unroll
    for (int i = 0; i < GROUP; i++) squares[i] = 0;
    #pragma unroll
    for (int j = 0; j < KEY / 32; j++) {
      convolve(begin, kind * KEYS + key_head * KEY + j * 32 + lane, mixed[j]);
      #pragma unroll
      for (int i = 0; i < GROUP; i++) squares[i] = fmaf(mixed[j][i], mixed[j][i], squares[i]);
    }
    #pragma unroll
    for (int o = 16; o > 0; o >>= 1)
      #pragma unroll
      for (int i = 0; i < GROUP; i++) squares[i] += __shfl_xor_sync(0xffffffff, squares[i], o);
    #pragma unroll
    for (int i = 0; i < GROUP; i++) {
      float* const to = (float*)(kind ? keys : queries)[buffer][group + i];
      const float factor = rsqrtf(squares[i] + EPS) * (kind ? 1.f : SCALE);
      #pragma unroll
      for (int j = 0; j < KEY / 32; j++) to[j * 32 + lane] = mixed[j][i] * factor;
    }
  }
};
// The gated norm of TILE tokens, if the thread block has all columns of the head.
auto gate = [&](int tile, int buffer) {
  for (int t = preparer; t < TILE && tile + t < count; t += PREPARERS) {
    const long line = first + tile + t;
    gated_norm<COLUMNS>(found[buffer][t], (const N*)lines + line * LINE + GATES + head * VALUE, gain, NORM_EPS,
                        (N*)out + (line * HEADS + head) * VALUE, lane);
  }
};
// A lane's rows of the state: numbers 4 * part + 16 * i and the next three.
const int part = lane >> 3, column = warp * 8 + (lane & 7);
const long place = TAP_NUMBERS + ((long)head * KEY + part * 4) * VALUE + slice * COLUMNS + column;
float state[ROWS];
auto store = [&](float* to) {
  #pragma unroll
  for (int i = 0; i < ROWS; i++) to[place + (i / 4 * 16 + i % 4) * VALUE] = state[i];
};
// While a tile is scanned, the next one is prepared, and the norm of the one before it is computed. The
// first round only prepares, the last one only norms.
int buffer = 1;
for (int tile = -TILE; tile < count + (GATED ? TILE : 0); tile += TILE, buffer ^= 1) {
  if (preparer >= 0) {
    if (GATED && tile > 0) gate(tile - TILE, buffer ^ 1);
    prepare(tile + TILE, buffer ^ 1);
  } else if (tile < 0) {
    #pragma unroll
    for (int i = 0; i < ROWS; i++) state[i] = before ? before[place + (i / 4 * 16 + i % 4) * VALUE] : 0.f;
  } else {
    const int tokens = min(TILE, count - tile);
    for (int t = 0; t < tokens; t++) {
      const float decay = decays[buffer][t];
      float sum[4] = {0, 0, 0, 0};
      #pragma unroll
      for (int i = 0; i < ROWS / 4; i++) {
        const float4 key = keys[buffer][t][i * 4 + part];
        sum[0] = fmaf(key.x, state[i * 4], sum[0]);
        sum[1] = fmaf(key.y, state[i * 4 + 1], sum[1]);
        sum[2] = fmaf(key.z, state[i * 4 + 2], sum[2]);
        sum[3] = fmaf(key.w, state[i * 4 + 3], sum[3]);
      }
      float read = (sum[0] + sum[1]) + (sum[2] + sum[3]);
      read += __shfl_xor_sync(0xffffffff, read, 8);
      read += __shfl_xor_sync(0xffffffff, read, 16);
      const float delta = rates[buffer][t] * fmaf(-decay, read, values[buffer][t][column]);
      sum[0] = sum[1] = sum[2] = sum[3] = 0;
      #pragma unroll
      for (int i = 0; i < ROWS / 4; i++) {
        const float4 key = keys[buffer][t][i * 4 + part], query = queries[buffer][t][i * 4 + part];
        state[i * 4] = fmaf(key.x, delta, decay * state[i * 4]);
        state[i * 4 + 1] = fmaf(key.y, delta, decay * state[i * 4 + 1]);
        state[i * 4 + 2] = fmaf(key.z, delta, decay * state[i * 4 + 2]);
        state[i * 4 + 3] = fmaf(key.w, delta, decay * state[i * 4 + 3]);
        sum[0] = fmaf(query.x, state[i * 4], sum[0]);
        sum[1] = fmaf(query.y, state[i * 4 + 1], sum[1]);
        sum[2] = fmaf(query.z, state[i * 4 + 2], sum[2]);
        sum[3] = fmaf(query.w, state[i * 4 + 3], sum[3]);
      }
      float answer = (sum[0] + sum[1]) + (sum[2] + sum[3]);
      answer += __shfl_xor_sync(0xffffffff, answer, 8);
      answer += __shfl_xor_sync(0xffffffff, answer, 16);
      if (part == 0) {
        if (GATED) found[buffer][t][column] = answer;
        else ((float*)out)[((long)(first + tile + t) * HEADS + head) * VALUE + slice * COLUMNS + column] = answer;
      }
      if (every || tile + t == count - 1) store(written + (every ? tile + t : 0) * STATE);
    }
  }
  __syncthreads();
}
if (preparer >= 0) {
  // The last inputs of the convolution. One thread block of a key head writes those of its queries and keys.
  const bool of_keys = slice == 0 && head % RATIO == 0;
  for (int t = every ? 0 : count - 1; t < count; t++) {
    float* const to = written + (every ? t : 0) * STATE;
    for (int tap = preparer; tap < TAPS; tap += PREPARERS) {
      auto keep = [&](int begin, int numbers) {
        for (int i = begin + lane; i < begin + numbers; i += 32)
          to[(long)tap * CHANNELS + i] = input(t - TAPS + 1 + tap, i);
      };
      keep(2 * KEYS + head * VALUE + slice * COLUMNS, COLUMNS);
      if (of_keys) {
        keep(key_head * KEY, KEY);
        keep(KEYS + key_head * KEY, KEY);
      }
    }
  }
}

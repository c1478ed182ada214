// A barrier of all thread blocks of a launch, which must be resident at a time. `state` has three numbers
// that are zeros before the first launch: a counter of arrivals, its value at the beginning of the launch, and
// whether a launch has given up. The counter goes on from launch to launch, whatever their grids.
struct GridBarrier {
  unsigned* state;
  bool* failed;  // in shared memory
  unsigned goal;  // the counter when all blocks have arrived
  // All threads of all blocks call it first.
  __device__ inline GridBarrier(unsigned* state, bool* failed)
      : state(state), failed(failed), goal(load_acquire(state + 1)) {
    if (threadIdx.x == 0) *failed = load_acquire(state + 2) != 0;
    __syncthreads();
  }
  // Notes that this block has written the numbers that others read after the barrier.
  __device__ inline void arrive() {
    __syncthreads();
    if (threadIdx.x == 0) add_release(state);
    goal += gridDim.x;
  }
  // Waits for all blocks. If some are missing after PATIENCE cycles of the clock, it returns false with
  // GIVES_UP, and otherwise ends the program of the device.
  template <bool GIVES_UP> __device__ inline bool wait() {
    constexpr long long PATIENCE = 1ll << 33;  // about 4 s
    if (threadIdx.x == 0) {
      const long long since = clock64();
      while ((int)(load_acquire(state) - goal) < 0 && !(GIVES_UP && *failed))
        if (clock64() - since > PATIENCE) {
          if (!GIVES_UP) __trap();
          *failed = true;
          add_release(state + 2);
        }
    }
    __syncthreads();
    return !(GIVES_UP && *failed);
  }
  // Ends the launch, after the last barrier.
  __device__ inline void end() {
    if (blockIdx.x == 0 && threadIdx.x == 0) state[1] = goal;
  }
};

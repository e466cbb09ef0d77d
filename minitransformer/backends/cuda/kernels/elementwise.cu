// Sums, checksums, factors and additions.

// out = the sum of `values`. One block.
// Shapes: out [1], values [count]
extern "C" __global__ void sum_all(float* out, const float* values, int count) {
  float sum = 0.0f;
  for (int i = threadIdx.x; i < count; i += blockDim.x) sum += values[i];
  sum = block_sum(sum);
  if (threadIdx.x == 0) *out = sum;
}

// x = x * factor[0], in place. One thread for each vector.
// Shapes: x [count]
extern "C" __global__ void scale(real* x, const float* factor, i64 count) {
  i64 start = thread_index() * VECTOR;
  if (start >= count) return;
  int width = count - start < VECTOR ? count - start : VECTOR;
  float value[VECTOR];
  load(value, x + start, 0, width);
  for (int i = 0; i < VECTOR; i++) value[i] *= *factor;
  store(x + start, 0, width, value);
}

// total = a + b. One thread for each vector.
// Shapes: total, a, b [count]
extern "C" __global__ void add_arrays(real* total, const real* a, const real* b,
                                      i64 count) {
  i64 start = thread_index() * VECTOR;
  if (start >= count) return;
  int width = count - start < VECTOR ? count - start : VECTOR;
  float value[VECTOR], other[VECTOR];
  load(value, a + start, 0, width);
  load(other, b + start, 0, width);
  for (int i = 0; i < VECTOR; i++) value[i] += other[i];
  store(total + start, 0, width, value);
}

// partial[block] = the sum modulo 2^64 of hash(values[i], i) over that block's share:
// the last steps of SplitMix64 (Steele et al., 2014). One block for each partial sum.
// Shapes: values [count], partial [gridDim.x]
extern "C" __global__ void checksum(u64* partial, const u32* values, i64 count) {
  __shared__ u64 sums[WARPS];
  u64 sum = 0;
  for (i64 i = thread_index(); i < count; i += (i64)gridDim.x * blockDim.x) {
    u64 x = ((u64)values[i] << 32 ^ i) + 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    sum += x ^ x >> 31;
  }
  for (int step = WARP / 2; step > 0; step /= 2)
    sum += __shfl_xor_sync(0xffffffff, sum, step);
  if (threadIdx.x % WARP == 0) sums[threadIdx.x / WARP] = sum;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int i = 1; i < WARPS; i++) sum += sums[i];
  partial[blockIdx.x] = sum;
}

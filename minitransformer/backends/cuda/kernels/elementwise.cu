// Sums, factors and additions.

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

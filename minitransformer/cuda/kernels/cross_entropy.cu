// The label-smoothed loss (sections 3.4 and 5.4).

// The vectors of a row that a thread keeps in registers, at most; with 1,024 threads
// this holds 49,152 logits of 16 bits or 40,960 of 32.
constexpr int KEPT_VECTORS = VECTOR == 4 ? 10 : 6;

__device__ void unpack(float (&value)[VECTOR], const uint4& bits) {
  const real* element = (const real*)&bits;
  for (int i = 0; i < VECTOR; i++) value[i] = (float)element[i];
}

// With p = softmax(logits) and q = confidence * one-hot(target) + smoothing:
// losses = -sum(q * log p); the gradient p - q overwrites the logits. Both are 0 where
// the target is padding. One block for each row, of up to 1,024 threads; rows begin
// `stride` elements apart. A row is read once, unless its end exceeds the registers.
// Shapes: logits [N, V], losses, targets [N]; V = width
extern "C" __global__ void __launch_bounds__(1024)
    cross_entropy(real* logits, float* losses, const int* targets, float confidence,
                  float smoothing, int padding, int width, int stride) {
  i64 row = blockIdx.x;
  int target = targets[row], step = blockDim.x * VECTOR, first = threadIdx.x * VECTOR;
  logits += row * stride;
  if (target == padding) {
    float zero[VECTOR] = {};
    for (int column = first; column < width; column += step)
      store(logits, column, width, zero);
    if (threadIdx.x == 0) losses[row] = 0.0f;
    return;
  }
  LogSumExp total{LOWEST, 0.0f};
  float logit_sum = 0.0f, target_logit = (float)logits[target];
  auto add = [&](const float(&x)[VECTOR], int column) {
    for (int i = 0; i < VECTOR; i++) {
      if (column + i >= width) break;
      total.add(x[i]);
      logit_sum += x[i];
    }
  };
  uint4 kept[KEPT_VECTORS];  // not unpacked, as numbers of 16 bits fill a register each
#pragma unroll
  for (int k = 0; k < KEPT_VECTORS; k++) {
    int column = first + k * step;
    if (column >= width) break;
    kept[k] = *(const uint4*)(logits + column);  // `stride` is whole vectors
    float x[VECTOR];
    unpack(x, kept[k]);
    add(x, column);
  }
  for (int column = first + KEPT_VECTORS * step; column < width; column += step) {
    float x[VECTOR];
    load(x, logits, column, width);
    add(x, column);
  }
  total = block_log_sum_exp(total);
  logit_sum = block_sum(logit_sum);
  float inverse = 1.0f / total.sum;
  auto write = [&](float(&x)[VECTOR], int column) {
    for (int i = 0; i < VECTOR; i++) {
      float q = smoothing + (column + i == target ? confidence : 0.0f);
      x[i] = expf(x[i] - total.maximum) * inverse - q;
    }
    store(logits, column, width, x);
  };
#pragma unroll
  for (int k = 0; k < KEPT_VECTORS; k++) {
    int column = first + k * step;
    if (column >= width) break;
    float x[VECTOR];
    unpack(x, kept[k]);
    write(x, column);
  }
  for (int column = first + KEPT_VECTORS * step; column < width; column += step) {
    float x[VECTOR];
    load(x, logits, column, width);
    write(x, column);
  }
  if (threadIdx.x == 0)
    losses[row] = total.value() - confidence * target_logit - smoothing * logit_sum;
}

// The label-smoothed loss (sections 3.4 and 5.4).

// With p = softmax(logits) and q = confidence * one-hot(target) + smoothing:
// losses = -sum(q * log p); the gradient p - q overwrites the logits. Both are 0 where
// the target is padding. One block for each row; rows begin `stride` elements apart.
// Shapes: logits [N, V], losses, targets [N]; V = width
extern "C" __global__ void cross_entropy(
    real* logits, float* losses, const int* targets, float confidence, float smoothing,
    int padding, int width, int stride) {
  i64 row = blockIdx.x;
  int target = targets[row], step = blockDim.x * VECTOR;
  logits += row * stride;
  if (target == padding) {
    float zero[VECTOR] = {};
    for (int column = threadIdx.x * VECTOR; column < width; column += step)
      store(logits, column, width, zero);
    if (threadIdx.x == 0) losses[row] = 0.0f;
    return;
  }
  LogSumExp total{LOWEST, 0.0f};
  float logit_sum = 0.0f, target_logit = (float)logits[target];
  for (int column = threadIdx.x * VECTOR; column < width; column += step) {
    float x[VECTOR];
    load(x, logits, column, width);
    for (int i = 0; i < VECTOR; i++) {
      if (column + i >= width) break;
      total.add(x[i]);
      logit_sum += x[i];
    }
  }
  total = block_log_sum_exp(total);
  logit_sum = block_sum(logit_sum);
  for (int column = threadIdx.x * VECTOR; column < width; column += step) {
    float x[VECTOR];
    load(x, logits, column, width);
    for (int i = 0; i < VECTOR; i++) {
      float q = smoothing + (column + i == target ? confidence : 0.0f);
      x[i] = expf(x[i] - total.maximum) / total.sum - q;
    }
    store(logits, column, width, x);
  }
  if (threadIdx.x == 0)
    losses[row] = total.value() - confidence * target_logit - smoothing * logit_sum;
}

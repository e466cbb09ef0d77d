// The label-smoothed loss (sections 3.4 and 5.4).

// The threads of a block, at most, of which each keeps so many vectors of a row in
// registers: 36,864 logits of 16 bits in all. A multiprocessor runs two blocks, of which
// one reads while the other computes; for sm_100 the compiler would spill registers.
constexpr int LOSS_THREADS = 384, KEPT_VECTORS = 12;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int LOSS_BLOCKS = 1;
#else
constexpr int LOSS_BLOCKS = 2;
#endif

// With p = softmax(logits) and q = confidence * one-hot(target) + smoothing:
// losses = -sum(q * log p); the gradient p - q overwrites the logits. Both are 0 where
// the target is padding. One block for each row, of up to 384 threads; rows begin
// `stride` elements apart, whole vectors. A row is read once, unless its end exceeds
// the registers.
// Shapes: logits [N, V], losses, targets [N]; V = width
extern "C" __global__ void __launch_bounds__(LOSS_THREADS, LOSS_BLOCKS)
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
  uint4 kept[KEPT_VECTORS];  // not unpacked, as numbers of 16 bits fill a register each
#pragma unroll
  for (int k = 0; k < KEPT_VECTORS; k++) {
    int column = first + k * step;
    if (column < width) kept[k] = *(const uint4*)(logits + column);  // whole vectors
  }
  // Call visit(x, column) for each vector of the row that this thread has.
  auto each = [&](auto visit) {
    float x[VECTOR];
#pragma unroll
    for (int k = 0; k < KEPT_VECTORS; k++) {
      int column = first + k * step;
      if (column >= width) break;
      unpack(x, kept[k]);
      visit(x, column);
    }
    for (int column = first + KEPT_VECTORS * step; column < width; column += step) {
      load(x, logits, column, width);
      visit(x, column);
    }
  };
  float highest = LOWEST, sum = 0.0f, logit_sum = 0.0f;
  float target_logit = (float)logits[target];
  each([&](const float(&x)[VECTOR], int column) {
    int left = width - column;
    for (int i = 0; i < VECTOR; i++) {
      highest = fmaxf(highest, i < left ? x[i] : LOWEST);
      logit_sum += i < left ? x[i] : 0.0f;
    }
  });
  float maximum = block_max(highest), shift = -maximum * LOG2_E;
  // exp(x - maximum), which is computed again in the end, faster than it is kept.
  auto weight = [&](float x) { return exp2f(fmaf(x, LOG2_E, shift)); };
  each([&](const float(&x)[VECTOR], int column) {
    int left = width - column;
    for (int i = 0; i < VECTOR; i++) sum += i < left ? weight(x[i]) : 0.0f;
  });
  sum = block_sum(sum);
  logit_sum = block_sum(logit_sum);
  float inverse = 1.0f / sum;
  each([&](float(&x)[VECTOR], int column) {
    int place = target - column;
    for (int i = 0; i < VECTOR; i++) x[i] = weight(x[i]) * inverse - smoothing;
    if (place >= 0 && place < VECTOR)
      for (int i = 0; i < VECTOR; i++) x[i] -= i == place ? confidence : 0.0f;
    store(logits, column, width, x);
  });
  if (threadIdx.x == 0)
    losses[row] =
        logf(sum) + maximum - confidence * target_logit - smoothing * logit_sum;
}

// Dropout, residual connection and layer normalisation (sections 3.1 and 5.4).

// h = residual + Dropout(x); out = (h - mean) / deviation * gain + bias, where
// deviation = sqrt(variance + epsilon). The backward pass reads h, the means and
// inverses = 1 / deviation. One warp for each row, which it holds in registers.
// Shapes: out, h, x, residual [rows, width], means, inverses [rows], gain, bias [width]
extern "C" __global__ void add_layer_norm(
    real* out, real* h, float* means, float* inverses, const real* x,
    const real* residual, const float* gain, const float* bias, float epsilon, i64 rows,
    int width, const u64* seed, u64 first, int threshold) {
  i64 row = warp_row();
  int lane = threadIdx.x % WARP;
  if (row >= rows) return;
  Dropout dropout{seed, first, threshold, width};
  float value[MAX_VECTORS][VECTOR], sum = 0.0f, squares = 0.0f;
#pragma unroll
  for (int k = 0; k < MAX_VECTORS; k++) {
    int column = (k * WARP + lane) * VECTOR;
    if (column >= width) break;
    float shortcut[VECTOR];
    load(value[k], x + row * width, column, width);
    load(shortcut, residual + row * width, column, width);
    dropout.apply(value[k], row, column);
    for (int i = 0; i < VECTOR; i++) {
      value[k][i] = (float)(real)(value[k][i] + shortcut[i]);
      sum += value[k][i];
    }
    store(h + row * width, column, width, value[k]);
  }
  float mean = warp_sum(sum) / width;
#pragma unroll
  for (int k = 0; k < MAX_VECTORS; k++) {
    int column = (k * WARP + lane) * VECTOR;
    for (int i = 0; i < VECTOR; i++) {
      if (column + i >= width) break;
      value[k][i] -= mean;
      squares += value[k][i] * value[k][i];
    }
  }
  float inverse = 1.0f / sqrtf(warp_sum(squares) / width + epsilon);
#pragma unroll
  for (int k = 0; k < MAX_VECTORS; k++) {
    int column = (k * WARP + lane) * VECTOR;
    if (column >= width) break;
    float factor[VECTOR], term[VECTOR];
    load_floats(factor, gain, column, width);
    load_floats(term, bias, column, width);
    for (int i = 0; i < VECTOR; i++)
      value[k][i] = value[k][i] * inverse * factor[i] + term[i];
    store(out + row * width, column, width, value[k]);
  }
  if (lane == 0) {
    means[row] = mean;
    inverses[row] = inverse;
  }
}

// With n = (h - mean) / deviation and dn = g * gain:
// dresidual = (dn - mean(dn) - n * mean(dn * n)) / deviation; dx = Dropout(dresidual).
// Without dropout dx is null. One warp for each row.
// Shapes: dx, dresidual, g, h [rows, width], means, inverses [rows], gain [width]
extern "C" __global__ void layer_norm_backward(
    real* dx, real* dresidual, const real* g, const real* h, const float* means,
    const float* inverses, const float* gain, i64 rows, int width, const u64* seed,
    u64 first, int threshold) {
  i64 row = warp_row();
  if (row >= rows) return;
  float mean = means[row], inverse = inverses[row], sum = 0.0f, product = 0.0f;
  // The rows are read again below, from the cache: registers for both would leave the
  // multiprocessor half empty.
  for (int column = lane_column(); column < width; column += WARP * VECTOR) {
    float normal[VECTOR], dnormal[VECTOR], factor[VECTOR];
    load(normal, h + row * width, column, width);
    load(dnormal, g + row * width, column, width);
    load_floats(factor, gain, column, width);
    for (int i = 0; i < VECTOR; i++) {
      dnormal[i] *= factor[i];  // 0 beyond the row's end
      sum += dnormal[i];
      product += dnormal[i] * ((normal[i] - mean) * inverse);
    }
  }
  sum = warp_sum(sum) / width;
  product = warp_sum(product) / width;
  Dropout dropout{seed, first, threshold, width};
  for (int column = lane_column(); column < width; column += WARP * VECTOR) {
    float normal[VECTOR], dnormal[VECTOR], factor[VECTOR];
    load(normal, h + row * width, column, width);
    load(dnormal, g + row * width, column, width);
    load_floats(factor, gain, column, width);
    for (int i = 0; i < VECTOR; i++) {
      float n = (normal[i] - mean) * inverse;
      dnormal[i] = (dnormal[i] * factor[i] - sum - n * product) * inverse;
    }
    store(dresidual + row * width, column, width, dnormal);
    if (dx == nullptr) continue;
    dropout.apply(dnormal, row, column);
    store(dx + row * width, column, width, dnormal);
  }
}

// partial = sums of the columns of g * n, with n as above, and of g: the first stage of
// the gradients of gain and bias.
// Shapes: partial [gridDim.y, 2, width], g, h [rows, width], means, inverses [rows]
extern "C" __global__ void gain_bias_gradients(
    float* partial, const real* g, const real* h, const float* means,
    const float* inverses, i64 rows, int width) {
  sum_columns<2>(partial, rows, width, [&](float (&x)[2][VECTOR], i64 row, int column) {
    load(x[0], h + row * width, column, width);
    load(x[1], g + row * width, column, width);
    float mean = means[row], inverse = inverses[row];
    for (int i = 0; i < VECTOR; i++) x[0][i] = (x[0][i] - mean) * inverse * x[1][i];
  });
}

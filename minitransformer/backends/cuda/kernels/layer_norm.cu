// Dropout, residual connection and layer normalisation (sections 3.1 and 5.4).

// How many blocks a multiprocessor must be able to run at a time: as many as it can
// without spilling registers.
constexpr int NORM_BLOCKS = VECTOR == 4 ? 2 : 3;

// A vector of a row, not unpacked, with zeros beyond the row's end.
__device__ uint4 fetch(const real* row, int column, int width, bool whole) {
  if (whole) return *(const uint4*)(row + column);
  float value[VECTOR];
  load(value, row, column, width);
  return pack(value);
}

// h = residual + Dropout(x); out = (h - mean) / deviation * gain + bias, where
// deviation = sqrt(variance + epsilon). The backward pass reads h, the means and
// inverses = 1 / deviation. One warp for each row, which it holds in registers. It asks
// memory for all of the row before it uses any of it.
// Shapes: out, h, x, residual [rows, width], means, inverses [rows], gain, bias [width]
extern "C" __global__ void __launch_bounds__(256, NORM_BLOCKS) add_layer_norm(
    real* out, real* h, float* means, float* inverses, const real* x,
    const real* residual, const float* gain, const float* bias, float epsilon, i64 rows,
    int width, const u64* seed, u64 first, int threshold) {
  i64 row = warp_row();
  int lane = threadIdx.x % WARP;
  if (row >= rows) return;
  Dropout dropout{seed, first, threshold, width};
  x += row * width, residual += row * width, h += row * width, out += row * width;
  uint4 kept[MAX_VECTORS], shortcuts[MAX_VECTORS];
  bool whole = in_vectors(x, width, width) && in_vectors(residual, width, width);
  float sum = 0.0f, squares = 0.0f;
#pragma unroll
  for (int k = 0; k < MAX_VECTORS; k++) {
    int column = (k * WARP + lane) * VECTOR;
    if (column >= width) break;
    kept[k] = fetch(x, column, width, whole);
    shortcuts[k] = fetch(residual, column, width, whole);
  }
#pragma unroll
  for (int k = 0; k < MAX_VECTORS; k++) {
    int column = (k * WARP + lane) * VECTOR;
    if (column >= width) break;
    float value[VECTOR], shortcut[VECTOR];
    unpack(value, kept[k]);
    unpack(shortcut, shortcuts[k]);
    dropout.apply(value, row, column);
    for (int i = 0; i < VECTOR; i++) {
      value[i] = (float)(real)(value[i] + shortcut[i]);
      sum += value[i];
    }
    store(h, column, width, value);
    kept[k] = pack(value);
  }
  float mean = warp_sum(sum) / width;
#pragma unroll
  for (int k = 0; k < MAX_VECTORS; k++) {
    int column = (k * WARP + lane) * VECTOR;
    if (column >= width) break;
    float value[VECTOR];
    unpack(value, kept[k]);
    for (int i = 0; i < VECTOR; i++) {
      value[i] -= mean;
      squares += column + i < width ? value[i] * value[i] : 0.0f;
    }
  }
  float inverse = 1.0f / sqrtf(warp_sum(squares) / width + epsilon);
#pragma unroll
  for (int k = 0; k < MAX_VECTORS; k++) {
    int column = (k * WARP + lane) * VECTOR;
    if (column >= width) break;
    float value[VECTOR], factor[VECTOR], term[VECTOR];
    unpack(value, kept[k]);
    load_floats(factor, gain, column, width);
    load_floats(term, bias, column, width);
    for (int i = 0; i < VECTOR; i++)
      value[i] = (value[i] - mean) * inverse * factor[i] + term[i];
    store(out, column, width, value);
  }
  if (lane == 0) {
    means[row] = mean;
    inverses[row] = inverse;
  }
}

// What a thread of the backward pass holds of a row: 16 elements.
constexpr int HELD = 16 / VECTOR;

// Replace two numbers by their sums over the threads of a row of the block, one warp or
// several. All threads of the block must call it.
__device__ void sum_row(float& a, float& b) {
  a = warp_sum(a);
  b = warp_sum(b);
  if (blockDim.x == WARP) return;
  __shared__ float sums[WARPS][2];
  int warps = blockDim.x / WARP, first = threadIdx.y * warps;
  __syncthreads();
  if (threadIdx.x % WARP == 0) {
    sums[first + threadIdx.x / WARP][0] = a;
    sums[first + threadIdx.x / WARP][1] = b;
  }
  __syncthreads();
  a = b = 0.0f;
  for (int i = first; i < first + warps; i++) a += sums[i][0], b += sums[i][1];
}

// With n = (h - mean) / deviation and dn = g * gain:
// dresidual = (dn - mean(dn) - n * mean(dn * n)) / deviation; dx = Dropout(dresidual).
// Without dropout dx is null. partial = sums of the columns of g * n and of g, the first
// stage of the gradients of gain and bias. Each of the gridDim.y blocks of 256 threads
// takes blockDim.y rows at a time, and a thread the same columns of all its rows.
// Shapes: dx, dresidual, g, h [rows, width], partial [gridDim.y, 2, width], means,
// inverses [rows], gain [width]
extern "C" __global__ void __launch_bounds__(256, 2) layer_norm_backward(
    real* dx, real* dresidual, float* partial, const real* g, const real* h,
    const float* means, const float* inverses, const float* gain, i64 rows, int width,
    const u64* seed, u64 first, int threshold) {
  Dropout dropout{seed, first, threshold, width};
  float sums[HELD][2][VECTOR] = {};
  i64 step = (i64)gridDim.y * blockDim.y;
  for (i64 start = (i64)blockIdx.y * blockDim.y; start < rows; start += step) {
    i64 row = start + threadIdx.y;
    int length = row < rows ? width : 0;  // a block's last rows may be missing
    float mean = length ? means[row] : 0.0f, inverse = length ? inverses[row] : 0.0f;
    float normal[HELD][VECTOR], dnormal[HELD][VECTOR], sum = 0.0f, product = 0.0f;
#pragma unroll
    for (int k = 0; k < HELD; k++) {
      int column = (k * blockDim.x + threadIdx.x) * VECTOR;
      load(normal[k], h + row * width, column, length);
      load(dnormal[k], g + row * width, column, length);
    }
#pragma unroll
    for (int k = 0; k < HELD; k++) {
      int column = (k * blockDim.x + threadIdx.x) * VECTOR;
      float factor[VECTOR];
      load_floats(factor, gain, column, length);
      for (int i = 0; i < VECTOR; i++) {
        normal[k][i] = (normal[k][i] - mean) * inverse;
        sums[k][0][i] += dnormal[k][i] * normal[k][i];
        sums[k][1][i] += dnormal[k][i];
        dnormal[k][i] *= factor[i];  // 0 beyond the row's end
        sum += dnormal[k][i];
        product += dnormal[k][i] * normal[k][i];
      }
    }
    sum_row(sum, product);
    sum /= width;
    product /= width;
#pragma unroll
    for (int k = 0; k < HELD; k++) {
      int column = (k * blockDim.x + threadIdx.x) * VECTOR;
      if (column >= length) break;
      for (int i = 0; i < VECTOR; i++)
        dnormal[k][i] = (dnormal[k][i] - sum - normal[k][i] * product) * inverse;
      store(dresidual + row * width, column, width, dnormal[k]);
      if (dx == nullptr) continue;
      dropout.apply(dnormal[k], row, column);
      store(dx + row * width, column, width, dnormal[k]);
    }
  }
#pragma unroll
  for (int k = 0; k < HELD; k++)
    store_partial(partial, sums[k], (k * blockDim.x + threadIdx.x) * VECTOR, width);
}

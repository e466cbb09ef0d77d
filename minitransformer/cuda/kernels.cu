// The kernels that the Python files of this folder launch. cuBLAS computes the matrix
// products; kernels of this file compute everything else.
//
// The file is compiled once for each type of activations, REAL (float, __half or
// __nv_bfloat16). All arithmetic is in float, whatever the type in memory. Matrices are
// stored row by row, and threads read and write vectors of 16 bytes where a row's
// address allows it; the compiler unrolls loops over a vector's elements. Every sum has
// a fixed order, so equal inputs give equal bits.
//
// The comment above each kernel gives its formula. "One thread for each vector" and the
// like say how it is launched, in blocks of 256 threads unless another number is given.
//
// Shapes: N rows (the tokens of all sentences), D columns, B sentences, H heads,
// T queries, S keys, V vocabulary, K beams.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#ifndef REAL
#define REAL float
#endif

#ifndef INFINITY  // as in NVRTC
#define INFINITY __int_as_float(0x7f800000)
#endif

using real = REAL;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

constexpr int WARP = 32;
constexpr int WARPS = 256 / WARP;          // in a block
constexpr int VECTOR = 16 / sizeof(real);  // elements of a 16-byte vector
constexpr int MAX_WIDTH = 1024;            // of a row that a warp holds in registers
constexpr int MAX_VECTORS = MAX_WIDTH / (WARP * VECTOR);  // of such a row, a thread
constexpr float LOWEST = -3.402823466e38f;

// ---- Threads and 16-byte vectors

__device__ i64 thread_index() { return (i64)blockIdx.x * blockDim.x + threadIdx.x; }

// The row of the calling warp, in kernels with one warp for each row.
__device__ i64 warp_row() { return (i64)blockIdx.x * WARPS + threadIdx.x / WARP; }

__device__ int vectors_in(int width) { return (width + VECTOR - 1) / VECTOR; }

struct alignas(16) Vector {
  real element[VECTOR];
};

// Read the vector of a row that starts at `column`, with zeros beyond the row's end.
__device__ void load(float (&value)[VECTOR], const real* row, int column, int width) {
  const real* from = row + column;
  if (column + VECTOR <= width && (size_t)from % sizeof(Vector) == 0) {
    Vector vector = *(const Vector*)from;
    for (int i = 0; i < VECTOR; i++) value[i] = (float)vector.element[i];
  } else {
    for (int i = 0; i < VECTOR; i++)
      value[i] = column + i < width ? (float)from[i] : 0.0f;
  }
}

// Write a vector to a row, but nothing beyond the row's end.
__device__ void store(real* row, int column, int width, const float (&value)[VECTOR]) {
  real* to = row + column;
  if (column + VECTOR <= width && (size_t)to % sizeof(Vector) == 0) {
    Vector vector;
    for (int i = 0; i < VECTOR; i++) vector.element[i] = (real)value[i];
    *(Vector*)to = vector;
  } else {
    for (int i = 0; i < VECTOR; i++)
      if (column + i < width) to[i] = (real)value[i];
  }
}

__device__ float warp_sum(float x) {
#pragma unroll
  for (int step = WARP / 2; step > 0; step /= 2)
    x += __shfl_xor_sync(0xffffffff, x, step);
  return x;
}

__device__ float warp_max(float x) {
#pragma unroll
  for (int step = WARP / 2; step > 0; step /= 2)
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, step));
  return x;
}

// Return the sum over the 256 threads of a block to each of them.
__device__ float block_sum(float x) {
  __shared__ float sums[WARPS];
  x = warp_sum(x);
  __syncthreads();
  if (threadIdx.x % WARP == 0) sums[threadIdx.x / WARP] = x;
  __syncthreads();
  float total = 0.0f;
  for (int i = 0; i < WARPS; i++) total += sums[i];
  return total;
}

// log(sum(exp(x))) over some numbers x, computed in one pass as an online softmax:
// `sum` is that of exp(x - maximum), so that nothing overflows.
struct LogSumExp {
  float maximum, sum;

  __device__ void add(float x) {
    if (x > maximum) {
      sum = sum * expf(maximum - x) + 1.0f;
      maximum = x;
    } else {
      sum += expf(x - maximum);
    }
  }

  __device__ float value() const { return logf(sum) + maximum; }
};

__device__ LogSumExp warp_log_sum_exp(LogSumExp own) {
  float maximum = warp_max(own.maximum);
  return {maximum, warp_sum(own.sum * expf(own.maximum - maximum))};
}

// Return the value over the 256 threads of a block to each of them. Call it once.
__device__ LogSumExp block_log_sum_exp(LogSumExp own) {
  __shared__ LogSumExp warps[WARPS];
  own = warp_log_sum_exp(own);
  if (threadIdx.x % WARP == 0) warps[threadIdx.x / WARP] = own;
  __syncthreads();
  float maximum = LOWEST, sum = 0.0f;
  for (LogSumExp warp : warps) maximum = fmaxf(maximum, warp.maximum);
  for (LogSumExp warp : warps) sum += warp.sum * expf(warp.maximum - maximum);
  return {maximum, sum};
}

// ---- Dropout

// Philox 4x32-10 (Salmon et al., 2011): 128 random bits from a seed and a counter.
__device__ uint4 philox(u64 seed, u64 counter) {
  u32 a = (u32)counter, b = (u32)(counter >> 32), c = 0, d = 0;
  u32 key_0 = (u32)seed, key_1 = (u32)(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; round++) {
    u64 p = (u64)0xD2511F53u * a, q = (u64)0xCD9E8D57u * c;
    a = (u32)(q >> 32) ^ b ^ key_0;
    b = (u32)q;
    c = (u32)(p >> 32) ^ d ^ key_1;
    d = (u32)p;
    key_0 += 0x9E3779B9u;
    key_1 += 0xBB67AE85u;
  }
  return {a, b, c, d};
}

// A dropout mask, which is never stored: each kernel computes its numbers again. Element
// (row, column) is kept if its random 16-bit number is at least `threshold`, and then
// scaled by 1 / (1 - rate), where rate = threshold / 65536. Each counter gives 8 numbers,
// and each row starts with a new counter, row 0 with `first`. Threshold 0 means no
// dropout.
struct Dropout {
  const u64* seed;
  u64 first;
  int threshold, width;

  __device__ void apply(float (&value)[VECTOR], i64 row, int column) const {
    if (threshold == 0) return;
    u64 counter = first + row * ((width + 7) / 8) + column / 8;
    uint4 random = philox(*seed, counter);
    float factor = 65536.0f / (65536 - threshold);
    for (int i = 0; i < VECTOR; i++) {
      int number = column % 8 + i;
      u32 word = number < 2 ? random.x : number < 4 ? random.y
               : number < 6 ? random.z : random.w;
      bool keep = (int)(word >> 16 * (i % 2) & 65535) >= threshold;
      value[i] = keep ? value[i] * factor : 0.0f;
    }
  }
};

// out = Dropout(x): x / (1 - rate) where the mask keeps it, else 0; rows begin `stride`
// elements apart. One thread for each vector.
// Shapes: out, x [rows, width]
extern "C" __global__ void dropout(real* out, const real* x, i64 rows, int width,
                                   int stride, const u64* seed, u64 first,
                                   int threshold) {
  i64 row = thread_index() / vectors_in(width);
  int column = thread_index() % vectors_in(width) * VECTOR;
  if (row >= rows) return;
  float value[VECTOR];
  load(value, x + row * stride, column, width);
  Dropout{seed, first, threshold, width}.apply(value, row, column);
  store(out + row * stride, column, width, value);
}

// ---- Sums of columns
// A matrix is summed over its rows in two stages. In the first, block (x, y) adds up a
// stripe of columns over the y-th of gridDim.y equal shares of the rows, which gives
// gridDim.y partial sums for each column. The second stage adds these up in the same
// way. Both have one thread for each vector of a row, in blocks of 32 x 8 threads.

// Write this block's partial sums of SUMS quantities for each column. `read(x, row,
// column)` sets x to a vector of each quantity.
// Shapes: partial [gridDim.y, SUMS, width]
template <int SUMS, typename Read>
__device__ void sum_columns(float* partial, i64 rows, int width, Read read) {
  __shared__ float sums[WARPS][WARP][SUMS * VECTOR + 1];
  int column = (blockIdx.x * WARP + threadIdx.x) * VECTOR;
  i64 share = (rows + gridDim.y - 1) / gridDim.y, start = blockIdx.y * share;
  i64 end = start + share < rows ? start + share : rows;
  float sum[SUMS][VECTOR] = {};
  if (column < width) {
    for (i64 row = start + threadIdx.y; row < end; row += WARPS) {
      float x[SUMS][VECTOR];
      read(x, row, column);
      for (int i = 0; i < SUMS * VECTOR; i++)
        sum[i / VECTOR][i % VECTOR] += x[i / VECTOR][i % VECTOR];
    }
  }
  for (int i = 0; i < SUMS * VECTOR; i++)
    sums[threadIdx.y][threadIdx.x][i] = sum[i / VECTOR][i % VECTOR];
  __syncthreads();
  if (threadIdx.y >= SUMS) return;
  for (int i = 0; i < VECTOR && column + i < width; i++) {
    float total = 0.0f;
    for (int y = 0; y < WARPS; y++)
      total += sums[y][threadIdx.x][threadIdx.y * VECTOR + i];
    partial[((i64)blockIdx.y * SUMS + threadIdx.y) * width + column + i] = total;
  }
}

// out = the sum of the rows of `partial`: the second stage.
// Shapes: out [width], partial [count, width]
extern "C" __global__ void sum_partials(float* out, const float* partial, i64 count,
                                        int width) {
  sum_columns<1>(out, count, width, [&](float (&x)[1][VECTOR], i64 row, int column) {
    for (int i = 0; i < VECTOR; i++)
      x[0][i] = column + i < width ? partial[row * width + column + i] : 0.0f;
  });
}

// partial = sums of the columns of x: the first stage.
// Shapes: partial [gridDim.y, width], x [rows, width]
extern "C" __global__ void column_sums(float* partial, const real* x, i64 rows,
                                       int width) {
  sum_columns<1>(partial, rows, width, [&](float (&y)[1][VECTOR], i64 row, int column) {
    load(y[0], x + row * width, column, width);
  });
}

// ---- Embedding

// out[n] = Dropout(table[ids[n]] * scale + positions[n % length]). One thread for each
// vector.
// Shapes: out [N, D], table [V, D], ids [N], positions [length, D]; N = tokens
extern "C" __global__ void embedding(
    real* out, const real* table, const int* ids, const float* positions, float scale,
    i64 tokens, int length, int width, const u64* seed, u64 first, int threshold) {
  i64 token = thread_index() / vectors_in(width);
  int column = thread_index() % vectors_in(width) * VECTOR;
  if (token >= tokens) return;
  const float* position = positions + token % length * width;
  float value[VECTOR];
  load(value, table + (i64)ids[token] * width, column, width);
  for (int i = 0; i < VECTOR; i++)
    if (column + i < width) value[i] = value[i] * scale + position[column + i];
  Dropout{seed, first, threshold, width}.apply(value, token, column);
  store(out + token * width, column, width, value);
}

// first[id] = the index of the first token with that id; `first` holds `tokens` before.
// A minimum does not depend on the order of the atomics. One thread for each token.
// Shapes: first [V], ids [N]; N = tokens
extern "C" __global__ void first_occurrences(int* first, const int* ids, int tokens) {
  i64 token = thread_index();
  if (token < tokens) atomicMin(&first[ids[token]], (int)token);
}

// dtable[id] = scale * the sum of g[n] over all tokens n with ids[n] = id. One block
// for each token; only the block of an id's first token has work. It finds the id's
// tokens among 256 at a time, and adds up their rows of g. Each thread takes a vector
// of columns. Where a row is short, the block has threads for several rows at once:
// group i of them takes the tokens i, i + groups, ... of those found.
// Shapes: dtable [V, D], g [N, D], ids [N], first [V]; N = tokens
extern "C" __global__ void embedding_backward(float* dtable, const real* g,
                                              const int* ids, const int* first,
                                              float scale, int tokens, int width) {
  constexpr int THREADS = WARPS * WARP;
  __shared__ int found[THREADS], found_by[WARPS];
  __shared__ float sums[THREADS][VECTOR];
  int id = ids[blockIdx.x], lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  if (first[id] != (int)blockIdx.x) return;
  int vectors = vectors_in(width) < THREADS ? vectors_in(width) : THREADS;
  int groups = THREADS / vectors, group = threadIdx.x / vectors;
  for (int start = 0; start < width; start += vectors * VECTOR) {
    int column = start + threadIdx.x % vectors * VECTOR;
    float sum[VECTOR] = {};
    for (int token = blockIdx.x + threadIdx.x; token - (int)threadIdx.x < tokens;
         token += THREADS) {
      bool equal = token < tokens && ids[token] == id;
      u32 equals = __ballot_sync(0xffffffff, equal);
      if (lane == 0) found_by[warp] = __popc(equals);
      __syncthreads();
      int before = __popc(equals & ((1u << lane) - 1)), count = 0;
      for (int i = 0; i < WARPS; i++) {
        if (i < warp) before += found_by[i];
        count += found_by[i];
      }
      if (equal) found[before] = token;
      __syncthreads();
#pragma unroll 4
      for (int i = group; i < count && group < groups && column < width; i += groups) {
        float x[VECTOR];
        load(x, g + (i64)found[i] * width, column, width);
        for (int j = 0; j < VECTOR; j++) sum[j] += x[j];
      }
    }
    for (int j = 0; j < VECTOR; j++) sums[threadIdx.x][j] = sum[j];
    __syncthreads();
    for (int j = 0; group == 0 && j < VECTOR && column + j < width; j++) {
      float total = 0.0f;
      for (int i = 0; i < groups; i++) total += sums[i * vectors + threadIdx.x][j];
      dtable[(i64)id * width + column + j] = total * scale;
    }
  }
}

// ---- Linear layers

// out = out + bias, or max(0, out + bias) with `relu`, in place; without a bias where
// that is null. One thread for each vector.
// Shapes: out [rows, width], bias [width]
extern "C" __global__ void bias_relu(real* out, const float* bias, i64 rows, int width,
                                     int relu) {
  i64 row = thread_index() / vectors_in(width);
  int column = thread_index() % vectors_in(width) * VECTOR;
  if (row >= rows) return;
  float value[VECTOR];
  load(value, out + row * width, column, width);
  for (int i = 0; i < VECTOR; i++) {
    if (bias != nullptr && column + i < width) value[i] += bias[column + i];
    if (relu && value[i] < 0.0f) value[i] = 0.0f;
  }
  store(out + row * width, column, width, value);
}

// masked = g where out > 0, else 0; partial = sums of the columns of `masked`, the
// first stage of the bias's gradient.
// Shapes: masked, g, out [rows, width], partial [gridDim.y, width]
extern "C" __global__ void relu_backward(real* masked, float* partial, const real* g,
                                         const real* out, i64 rows, int width) {
  sum_columns<1>(partial, rows, width, [&](float (&x)[1][VECTOR], i64 row, int column) {
    float activated[VECTOR];
    load(x[0], g + row * width, column, width);
    load(activated, out + row * width, column, width);
    for (int i = 0; i < VECTOR; i++) x[0][i] = activated[i] > 0.0f ? x[0][i] : 0.0f;
    store(masked + row * width, column, width, x[0]);
  });
}

// ---- Dropout, residual connection and layer normalisation (sections 3.1 and 5.4)

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
    for (int i = 0; i < VECTOR; i++)
      if (column + i < width)
        value[k][i] = value[k][i] * inverse * gain[column + i] + bias[column + i];
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
  int lane = threadIdx.x % WARP;
  if (row >= rows) return;
  float mean = means[row], inverse = inverses[row];
  float normal[MAX_VECTORS][VECTOR], dnormal[MAX_VECTORS][VECTOR];
  float sum = 0.0f, product = 0.0f;
#pragma unroll
  for (int k = 0; k < MAX_VECTORS; k++) {
    int column = (k * WARP + lane) * VECTOR;
    if (column >= width) break;
    load(normal[k], h + row * width, column, width);
    load(dnormal[k], g + row * width, column, width);
    for (int i = 0; i < VECTOR; i++) {
      if (column + i >= width) break;
      normal[k][i] = (normal[k][i] - mean) * inverse;
      dnormal[k][i] *= gain[column + i];
      sum += dnormal[k][i];
      product += dnormal[k][i] * normal[k][i];
    }
  }
  sum = warp_sum(sum) / width;
  product = warp_sum(product) / width;
  Dropout dropout{seed, first, threshold, width};
#pragma unroll
  for (int k = 0; k < MAX_VECTORS; k++) {
    int column = (k * WARP + lane) * VECTOR;
    if (column >= width) break;
    for (int i = 0; i < VECTOR; i++)
      dnormal[k][i] = (dnormal[k][i] - sum - normal[k][i] * product) * inverse;
    store(dresidual + row * width, column, width, dnormal[k]);
    if (dx == nullptr) continue;
    dropout.apply(dnormal[k], row, column);
    store(dx + row * width, column, width, dnormal[k]);
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

// ---- Attention (equation 1)
// The scores of a query are a row, and rows begin `stride` elements apart.

// The addresses of the matrices of three batches, as cuBLAS wants them: matrix (o, i)
// of a is at a + o * a_outer + i * a_inner. Strides are in bytes. Rows of `out` have an
// even length, so that each begins at a multiple of 16 bytes. One thread for each
// matrix of a batch.
// Shapes: out [3, outer * inner rounded up]
extern "C" __global__ void matrix_pointers(
    u64* out, int outer, int inner, u64 a, i64 a_outer, i64 a_inner, u64 b, i64 b_outer,
    i64 b_inner, u64 c, i64 c_outer, i64 c_inner) {
  i64 index = thread_index(), count = (i64)outer * inner, row = count + count % 2;
  if (index >= count) return;
  i64 o = index / inner, i = index % inner;
  out[index] = a + o * a_outer + i * a_inner;
  out[index + row] = b + o * b_outer + i * b_inner;
  out[index + 2 * row] = c + o * c_outer + i * c_inner;
}

// scores = softmax(scores) over the keys, in place, after `masked_score` was added
// where the mask forbids a key. The four strides find the mask's element (b, h, t, s);
// one that is 0 broadcasts the mask along its axis. One warp for each row (b, h, t).
// Shapes: scores [B, H, T, S]; rows = B H T
extern "C" __global__ void softmax(real* scores, const bool* mask, int stride_b,
                                   int stride_h, int stride_t, int stride_s,
                                   float masked_score, i64 rows, int heads, int queries,
                                   int keys, int stride) {
  i64 row = warp_row();
  int lane = threadIdx.x % WARP;
  if (row >= rows) return;
  int t = row % queries, h = row / queries % heads, b = row / queries / heads;
  if (mask != nullptr)
    mask += (i64)b * stride_b + (i64)h * stride_h + (i64)t * stride_t;
  scores += row * stride;
  auto score = [&](int s) {
    bool allowed = mask == nullptr || mask[(i64)s * stride_s];
    return (float)scores[s] + (allowed ? 0.0f : masked_score);
  };
  LogSumExp total{LOWEST, 0.0f};
  for (int s = lane; s < keys; s += WARP) total.add(score(s));
  total = warp_log_sum_exp(total);
  for (int s = lane; s < keys; s += WARP)
    scores[s] = (real)(expf(score(s) - total.maximum) / total.sum);
}

// With d = Dropout(dweights): dscores = (d - sum(d * weights)) * weights, which
// overwrites dweights. One warp for each row.
// Shapes: dweights, weights [rows, keys]
extern "C" __global__ void softmax_backward(real* dweights, const real* weights,
                                            i64 rows, int keys, int stride,
                                            const u64* seed, u64 first, int threshold) {
  i64 row = warp_row();
  int lane = threadIdx.x % WARP;
  if (row >= rows) return;
  dweights += row * stride;
  weights += row * stride;
  Dropout dropout{seed, first, threshold, keys};
  float sum = 0.0f;
  for (int column = lane * VECTOR; column < keys; column += WARP * VECTOR) {
    float d[VECTOR], w[VECTOR];
    load(d, dweights, column, keys);
    load(w, weights, column, keys);
    dropout.apply(d, row, column);
    for (int i = 0; i < VECTOR; i++) sum += d[i] * w[i];
  }
  sum = warp_sum(sum);
  for (int column = lane * VECTOR; column < keys; column += WARP * VECTOR) {
    float d[VECTOR], w[VECTOR];
    load(d, dweights, column, keys);
    load(w, weights, column, keys);
    dropout.apply(d, row, column);
    for (int i = 0; i < VECTOR; i++) d[i] = (d[i] - sum) * w[i];
    store(dweights, column, keys, d);
  }
}

// ---- The label-smoothed loss (sections 3.4 and 5.4)

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

// total = total + term, in place. One thread for each vector.
// Shapes: total, term [count]
extern "C" __global__ void accumulate(real* total, const real* term, i64 count) {
  i64 start = thread_index() * VECTOR;
  if (start >= count) return;
  int width = count - start < VECTOR ? count - start : VECTOR;
  float value[VECTOR], other[VECTOR];
  load(value, total + start, 0, width);
  load(other, term + start, 0, width);
  for (int i = 0; i < VECTOR; i++) value[i] += other[i];
  store(total + start, 0, width, value);
}

// ---- Beam search (section 6.1)

// A candidate, whose index names a token or a beam and a token.
template <typename Value>
struct Candidate {
  Value value;
  int index;

  // The better candidate comes first: the higher value, the lower index among equals.
  __device__ bool before(Candidate other) const {
    return value > other.value || (value == other.value && index < other.index);
  }
};

template <typename Value>
__device__ Candidate<Value> warp_best(Candidate<Value> own) {
#pragma unroll
  for (int step = WARP / 2; step > 0; step /= 2) {
    Candidate<Value> other{__shfl_xor_sync(0xffffffff, own.value, step),
                           __shfl_xor_sync(0xffffffff, own.index, step)};
    if (other.before(own)) own = other;
  }
  return own;
}

// The best `count` tokens of each row of logits, best first, with their logits as
// values; log_totals = log(sum(exp(logits))) over all tokens. Tokens below `first` are
// never among the best; where too few others are left, a value is -infinity. One block
// for each row, which it searches once for each of the best.
// Shapes: values, tokens [N, count], log_totals [N], logits [N, V]; V = width
extern "C" __global__ void top_tokens(float* values, int* tokens, float* log_totals,
                                      const real* logits, int count, int first,
                                      int width) {
  __shared__ Candidate<float> warps[WARPS];
  i64 row = blockIdx.x;
  logits += row * width;
  LogSumExp total{LOWEST, 0.0f};
  for (int i = threadIdx.x; i < width; i += blockDim.x) total.add((float)logits[i]);
  total = block_log_sum_exp(total);
  Candidate<float> last{INFINITY, -1};
  for (int k = 0; k < count; k++) {
    Candidate<float> best{-INFINITY, 0x7fffffff};
    for (int i = first + threadIdx.x; i < width; i += blockDim.x) {
      Candidate<float> here{(float)logits[i], i};
      if (last.before(here) && here.before(best)) best = here;
    }
    best = warp_best(best);
    if (threadIdx.x % WARP == 0) warps[threadIdx.x / WARP] = best;
    __syncthreads();
    for (int i = 0; i < WARPS; i++)
      if (warps[i].before(best)) best = warps[i];
    __syncthreads();
    if (threadIdx.x == 0) {
      values[row * count + k] = best.value;
      tokens[row * count + k] = best.index;
    }
    last = best;
  }
  if (threadIdx.x == 0) log_totals[row] = total.value();
}

// The hypotheses that have ended: the `nbest` best of each sentence, best first. Step
// and beam say where the last token before EOS was chosen. `counts` counts all that
// have ended, also those that are not among the best.
// Shapes: scores, log_probs, steps, beams [B, nbest], counts [B]
struct FinishedHypotheses {
  double* scores;
  double* log_probs;
  int* steps;
  int* beams;
  int* counts;
  int nbest;

  __device__ void set(i64 i, double score, double log_prob, int step, int beam) {
    scores[i] = score, log_probs[i] = log_prob, steps[i] = step, beams[i] = beam;
  }

  // Insert a hypothesis behind those of at least its score.
  __device__ void add(int sentence, double score, double log_prob, int step, int beam) {
    int held = counts[sentence]++, rank = held < nbest ? held : nbest;
    i64 start = (i64)sentence * nbest;
    for (; rank > 0 && scores[start + rank - 1] < score; rank--) {
      i64 i = start + rank - 1;
      if (rank < nbest) set(i + 1, scores[i], log_probs[i], steps[i], beams[i]);
    }
    if (rank < nbest) set(start + rank, score, log_prob, step, beam);
  }
};

// cache[row, position] = latest[row]. One thread for each element.
// Shapes: cache [B K, capacity, width], latest [B K, width], position [1];
// count = B K width
extern "C" __global__ void append_to_cache(real* cache, const real* latest,
                                           const int* position, int count, int capacity,
                                           int width) {
  i64 i = thread_index();
  if (i >= count) return;
  i64 row = i / width, column = i % width;
  cache[(row * capacity + *position) * width + column] = latest[i];
}

// One step of the search that translation/beam_search.py describes. The candidates of
// a sentence are the `count` best tokens of each of its beams. The best `count`
// candidates are taken in turn: one that ends in EOS is a finished hypothesis if it is
// among the best K, and the best K of the others are the next beams. A sentence is done
// when no further step can improve its hypotheses; the beams of one that was done
// before get log-probability -infinity. One warp for each sentence, in blocks of 32.
//
// Parameters, for the B' sentences still in the batch, with `beams` beams each (1 in
// the first step, then K):
// - the next beams [B', K]: log-probabilities `next`, the beam of its sentence that
//   each continues (`origins`), the same as a row of all beams (`rows`), and the token
//   `chosen`; then done [B'];
// - the finished hypotheses of all B sentences, as in FinishedHypotheses;
// - the candidates: log_probs [B', beams] of the beams, and values, tokens
//   [B', beams, count] and log_totals [B', beams] as `top_tokens` returns them;
// - `sentences` [B'], the indices of the sentences in the whole batch; the step limits
//   of all sentences [B], and the length penalties of all lengths;
// - `beams`, K, `count`, the number of this step (from 1) and the id of EOS.
// A sentence with a logit that is not finite is done and has no hypothesis.
extern "C" __global__ void beam_search_step(
    double* next, int* origins, int* rows, int* chosen, bool* done, double* end_scores,
    double* end_log_probs, int* end_steps, int* end_beams, int* end_counts, int nbest,
    const double* log_probs, const float* values, const int* tokens,
    const float* log_totals, const int* sentences, const int* limits,
    const double* penalties, int beams, int beam_size, int count, int step, int eos) {
  int b = blockIdx.x, lane = threadIdx.x, sentence = sentences[b], live = 0;
  FinishedHypotheses finished{end_scores, end_log_probs, end_steps, end_beams,
                              end_counts, nbest};
  next += b * beam_size, origins += b * beam_size;
  rows += b * beam_size, chosen += b * beam_size;
  values += b * beams * count, tokens += b * beams * count;
  log_probs += b * beams, log_totals += b * beams;
  Candidate<double> last{INFINITY, -1};
  for (int k = 0; k < count && !done[b]; k++) {
    Candidate<double> best{-INFINITY, 0x7fffffff};
    for (int i = lane; i < beams * count; i += WARP) {
      Candidate<double> here{values[i] + (log_probs[i / count] - log_totals[i / count]),
                             i};
      if (last.before(here) && here.before(best)) best = here;
    }
    last = best = warp_best(best);
    if (lane > 0 || best.value == -INFINITY) continue;
    int token = tokens[best.index], beam = best.index / count;
    if (token != eos && live < beam_size) {
      next[live] = best.value, origins[live] = beam, chosen[live] = token;
      live++;
    } else if (token == eos && k < beam_size) {
      finished.add(sentence, best.value / penalties[step], best.value, step - 1, beam);
    }
  }
  if (lane > 0) return;
  for (int k = live; k < beam_size; k++)
    next[k] = -INFINITY, origins[k] = chosen[k] = 0;
  for (int k = 0; k < beam_size; k++) rows[k] = b * beams + origins[k];
  if (done[b]) return;
  for (int k = 0; k < beams; k++) {
    if (isfinite(log_totals[k])) continue;  // all are, unless the training diverged
    end_counts[sentence] = 0, done[b] = true;
    return;
  }
  bool at_limit = step == limits[sentence], none = end_counts[sentence] == 0;
  for (int k = 0; at_limit && none && k < live; k++)
    finished.add(sentence, next[k] / penalties[step], next[k], step, k);
  // Log-probabilities only fall, so this bounds the score that a live beam can reach.
  double reachable = next[0] / penalties[limits[sentence]];
  int held = end_counts[sentence];
  double to_beat = held >= nbest ? end_scores[sentence * nbest + nbest - 1] : -INFINITY;
  done[b] = at_limit || held >= beam_size || to_beat >= reachable ||
            next[0] == -INFINITY;
}

// ---- The update (section 5.3)

// partial[block] = the sum of squares of that block's share of the gradient. One block
// for each partial sum.
// Shapes: gradient [count], partial [gridDim.x]
extern "C" __global__ void square_sums(float* partial, const float* gradient,
                                       i64 count) {
  float sum = 0.0f;
  for (i64 i = thread_index(); i < count; i += (i64)gridDim.x * blockDim.x)
    sum += gradient[i] * gradient[i];
  sum = block_sum(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// The numbers that the host sets before each update.
struct AdamScalars {
  float rate, beta1, beta2, epsilon;
  float correction1, correction2;  // 1 - beta1^t, 1 - beta2^t
  float scale;                     // of the gradient: 1 / loss scale
  float clip_norm;                 // 0 for no clipping
};

// With g = gradient * scale, clipped to the norm `clip_norm`:
// first_moment = beta1 first_moment + (1 - beta1) g,
// second_moment = beta2 second_moment + (1 - beta2) g^2,
// parameters -= rate (first_moment / correction1) /
//               (sqrt(second_moment / correction2) + epsilon),
// and low_precision = the parameters as `real`, unless it is null. Nothing changes if
// `squares`, the sum of squares of the gradient, is not finite. One thread for each
// parameter.
// Shapes: squares [1], all other arrays [count]
extern "C" __global__ void adam(
    float* parameters, const float* gradient, float* first_moment, float* second_moment,
    real* low_precision, const AdamScalars* scalars, const float* squares, i64 count) {
  i64 i = thread_index();
  if (i >= count || !isfinite(*squares)) return;
  AdamScalars s = *scalars;
  float norm = sqrtf(*squares) * s.scale;
  bool clips = s.clip_norm > 0.0f && norm > s.clip_norm;
  float g = gradient[i] * s.scale * (clips ? s.clip_norm / norm : 1.0f);
  float m = first_moment[i] = s.beta1 * first_moment[i] + (1.0f - s.beta1) * g;
  float v = second_moment[i] = s.beta2 * second_moment[i] + (1.0f - s.beta2) * g * g;
  float root = sqrtf(v / s.correction2) + s.epsilon;
  float parameter = parameters[i] -= s.rate / s.correction1 * m / root;
  if (low_precision != nullptr) low_precision[i] = (real)parameter;
}

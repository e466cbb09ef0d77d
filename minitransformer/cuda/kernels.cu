// The kernels that cuda/ops.py launches. Everything between two matrix products is one
// of these; the products are cuBLAS's.
//
// The file is compiled once for each type of activation, REAL (float, __half or
// __nv_bfloat16). Arithmetic is done in float, whatever the type in memory. Matrices
// lie row by row. Threads read and write packs of 16 bytes where a row's address allows
// it. Every sum has a fixed order, so that the same input gives the same bits.
//
// "Launch" says how the threads are laid out: a thread a pack, a warp a row, and so on,
// in blocks of 256 threads unless another number is given.

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
constexpr int WARPS = 256 / WARP;         // in a block
constexpr int PACK = 16 / sizeof(real);   // elements
constexpr int MAX_WIDTH = 1024;           // of a row that a warp holds in registers
constexpr int MAX_PACKS = MAX_WIDTH / (WARP * PACK);  // of it in each thread
constexpr float LOWEST = -3.402823466e38f;

// ---------------------------------------------------------------------------------
// Threads and packs

__device__ i64 thread_index() { return (i64)blockIdx.x * blockDim.x + threadIdx.x; }

// Which row the calling warp works on, where each warp has one.
__device__ i64 warp_row() { return (i64)blockIdx.x * WARPS + threadIdx.x / WARP; }

__device__ int packs_in(int width) { return (width + PACK - 1) / PACK; }

struct alignas(16) Pack {
  real element[PACK];
};

// Read the pack of a row that starts at `column`; zeros stand for what is beyond it.
__device__ void load(float (&value)[PACK], const real* row, int column, int width) {
  const real* from = row + column;
  if (column + PACK <= width && (size_t)from % sizeof(Pack) == 0) {
    Pack pack = *(const Pack*)from;
#pragma unroll
    for (int i = 0; i < PACK; i++) value[i] = (float)pack.element[i];
  } else {
#pragma unroll
    for (int i = 0; i < PACK; i++)
      value[i] = column + i < width ? (float)from[i] : 0.0f;
  }
}

__device__ void store(real* row, int column, int width, const float (&value)[PACK]) {
  real* to = row + column;
  if (column + PACK <= width && (size_t)to % sizeof(Pack) == 0) {
    Pack pack;
#pragma unroll
    for (int i = 0; i < PACK; i++) pack.element[i] = (real)value[i];
    *(Pack*)to = pack;
  } else {
#pragma unroll
    for (int i = 0; i < PACK; i++)
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

// The sum over a block of 256 threads, in all of them.
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

// The sum of exp(x) over some numbers x, as total * exp(highest): nothing overflows.
struct ExpSum {
  float highest, total;

  __device__ void add(float x) {
    if (x > highest) {
      total = total * expf(highest - x) + 1.0f;
      highest = x;
    } else {
      total += expf(x - highest);
    }
  }
};

__device__ ExpSum joined(ExpSum a, ExpSum b) {
  float highest = fmaxf(a.highest, b.highest);
  return {highest, a.total * expf(a.highest - highest) +
                       b.total * expf(b.highest - highest)};
}

__device__ ExpSum warp_exp_sum(ExpSum own) {
  float highest = warp_max(own.highest);
  return {highest, warp_sum(own.total * expf(own.highest - highest))};
}

// ---------------------------------------------------------------------------------
// Dropout

// Philox 4x32-10 (Salmon et al., 2011): 16 random bytes, made of seed and counter.
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

// A mask that is never stored: element (row, column) is kept if its random byte is at
// least `threshold`. Bytes come 16 a counter, each row starting with a new one, from
// counter `first` on. A threshold of 0 means no dropout.
struct Dropout {
  const u64* seed;
  u64 first;
  int threshold, width;

  __device__ void apply(float (&value)[PACK], i64 row, int column) const {
    if (threshold == 0) return;
    u64 counter = first + row * ((width + 15) / 16) + column / 16;
    uint4 random = philox(*seed, counter);
    float factor = 256.0f / (256 - threshold);
#pragma unroll
    for (int i = 0; i < PACK; i++) {
      int place = column % 16 + i;
      u32 word = place < 4 ? random.x : place < 8 ? random.y
               : place < 12 ? random.z : random.w;
      bool keep = (int)(word >> 8 * (i % 4) & 255) >= threshold;
      value[i] = keep ? value[i] * factor : 0.0f;
    }
  }
};

// out = x * keep / (1 - rate), rows lying `stride` apart. Launch: a thread a pack.
extern "C" __global__ void dropout(real* out, const real* x, i64 rows, int width,
                                   int stride, const u64* seed, u64 first,
                                   int threshold) {
  i64 row = thread_index() / packs_in(width);
  int column = thread_index() % packs_in(width) * PACK;
  if (row >= rows) return;
  float value[PACK];
  load(value, x + row * stride, column, width);
  Dropout{seed, first, threshold, width}.apply(value, row, column);
  store(out + row * stride, column, width, value);
}

// ---------------------------------------------------------------------------------
// Sums of columns, in two stages: each of gridDim.y shares of the rows gives a partial
// sum of each column, and the same is done to these. Blocks of 32 x 8 threads.

// Write this block's partial sums of SUMS values a column, one after another in a row
// of `partial`. `read(x, row, column)` fills x with a pack of each.
template <int SUMS, typename Read>
__device__ void sum_columns(float* partial, i64 rows, int width, Read read) {
  __shared__ float sums[WARPS][WARP][SUMS * PACK + 1];
  int column = (blockIdx.x * WARP + threadIdx.x) * PACK;
  i64 share = (rows + gridDim.y - 1) / gridDim.y, start = blockIdx.y * share;
  i64 end = start + share < rows ? start + share : rows;
  float sum[SUMS][PACK] = {};
  if (column < width) {
    for (i64 row = start + threadIdx.y; row < end; row += WARPS) {
      float x[SUMS][PACK];
      read(x, row, column);
#pragma unroll
      for (int i = 0; i < SUMS * PACK; i++)
        sum[i / PACK][i % PACK] += x[i / PACK][i % PACK];
    }
  }
#pragma unroll
  for (int i = 0; i < SUMS * PACK; i++)
    sums[threadIdx.y][threadIdx.x][i] = sum[i / PACK][i % PACK];
  __syncthreads();
  if (threadIdx.y >= SUMS) return;
  for (int i = 0; i < PACK && column + i < width; i++) {
    float total = 0.0f;
    for (int y = 0; y < WARPS; y++)
      total += sums[y][threadIdx.x][threadIdx.y * PACK + i];
    partial[((i64)blockIdx.y * SUMS + threadIdx.y) * width + column + i] = total;
  }
}

// The second stage: out = the sum of `count` rows of partial sums.
extern "C" __global__ void sum_partials(float* out, const float* partial, int count,
                                        int width) {
  sum_columns<1>(out, count, width, [&](float (&x)[1][PACK], i64 row, int column) {
#pragma unroll
    for (int i = 0; i < PACK; i++)
      x[0][i] = column + i < width ? partial[row * width + column + i] : 0.0f;
  });
}

// The first stage for x itself.
extern "C" __global__ void column_sums(float* partial, const real* x, i64 rows,
                                       int width) {
  sum_columns<1>(partial, rows, width, [&](float (&sum)[1][PACK], i64 row, int column) {
    load(sum[0], x + row * width, column, width);
  });
}

// ---------------------------------------------------------------------------------
// Embedding

// out = Dropout(table[id] * scale + positions[place of the token in its sentence]).
// Launch: a thread a pack.
extern "C" __global__ void embed(real* out, const real* table, const int* ids,
                                 const float* positions, float scale, i64 tokens,
                                 int length, int width, const u64* seed, u64 first,
                                 int threshold) {
  i64 token = thread_index() / packs_in(width);
  int column = thread_index() % packs_in(width) * PACK;
  if (token >= tokens) return;
  const float* position = positions + token % length * width;
  float value[PACK];
  load(value, table + (i64)ids[token] * width, column, width);
#pragma unroll
  for (int i = 0; i < PACK; i++)
    if (column + i < width) value[i] = value[i] * scale + position[column + i];
  Dropout{seed, first, threshold, width}.apply(value, token, column);
  store(out + token * width, column, width, value);
}

// first[id] = the first token with that id; it holds `tokens` before. A minimum is the
// same in whatever order it is taken. Launch: a thread a token.
extern "C" __global__ void first_tokens(int* first, const int* ids, int tokens) {
  i64 token = thread_index();
  if (token < tokens) atomicMin(&first[ids[token]], (int)token);
}

// dtable[id] = scale * the sum of g over the tokens with that id. Launch: a block a
// token. That of an id's first token finds the others, 256 tokens at a time, and adds
// up their rows: each thread a pack of columns, of every row or, where a row is short,
// of every second, third ... row, so that the threads form groups.
extern "C" __global__ void embed_backward(float* dtable, const real* g, const int* ids,
                                          const int* first, float scale, int tokens,
                                          int width) {
  constexpr int THREADS = WARPS * WARP;
  __shared__ int found[THREADS], found_by[WARPS];
  __shared__ float sums[THREADS][PACK];
  int id = ids[blockIdx.x], lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  if (first[id] != (int)blockIdx.x) return;
  int packs = packs_in(width) < THREADS ? packs_in(width) : THREADS;
  int groups = THREADS / packs, group = threadIdx.x / packs;
  for (int start = 0; start < width; start += packs * PACK) {
    int column = start + threadIdx.x % packs * PACK;
    float sum[PACK] = {};
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
        float x[PACK];
        load(x, g + (i64)found[i] * width, column, width);
#pragma unroll
        for (int j = 0; j < PACK; j++) sum[j] += x[j];
      }
    }
    for (int j = 0; j < PACK; j++) sums[threadIdx.x][j] = sum[j];
    __syncthreads();
    for (int j = 0; group == 0 && j < PACK && column + j < width; j++) {
      float total = 0.0f;
      for (int i = 0; i < groups; i++) total += sums[i * packs + threadIdx.x][j];
      dtable[(i64)id * width + column + j] = total * scale;
    }
  }
}

// ---------------------------------------------------------------------------------
// Linear layers

// out = out + bias, or max(0, out + bias), in place. Launch: a thread a pack.
extern "C" __global__ void bias_relu(real* out, const float* bias, i64 rows, int width,
                                     int relu) {
  i64 row = thread_index() / packs_in(width);
  int column = thread_index() % packs_in(width) * PACK;
  if (row >= rows) return;
  float value[PACK];
  load(value, out + row * width, column, width);
#pragma unroll
  for (int i = 0; i < PACK; i++) {
    if (bias != nullptr && column + i < width) value[i] += bias[column + i];
    if (relu && value[i] < 0.0f) value[i] = 0.0f;
  }
  store(out + row * width, column, width, value);
}

// masked = g where out > 0, else 0, and partial sums of its columns: db.
// Launch: as sum_columns.
extern "C" __global__ void relu_backward(real* masked, float* partial, const real* g,
                                         const real* out, i64 rows, int width) {
  sum_columns<1>(partial, rows, width, [&](float (&x)[1][PACK], i64 row, int column) {
    float activated[PACK];
    load(x[0], g + row * width, column, width);
    load(activated, out + row * width, column, width);
#pragma unroll
    for (int i = 0; i < PACK; i++) x[0][i] = activated[i] > 0.0f ? x[0][i] : 0.0f;
    store(masked + row * width, column, width, x[0]);
  });
}

// ---------------------------------------------------------------------------------
// Dropout, residual connection and layer normalisation (sections 3.1 and 5.4)

// h = residual + Dropout(x), out = (h - mean) / deviation * gain + bias, where
// deviation = sqrt(variance + epsilon). h, mean and 1 / deviation are kept for the
// backward. Launch: a warp a row, which it holds in registers.
extern "C" __global__ void add_layer_norm(real* out, real* h, float* means,
                                          float* inverses, const real* x,
                                          const real* residual, const float* gain,
                                          const float* bias, float epsilon, i64 rows,
                                          int width, const u64* seed, u64 first,
                                          int threshold) {
  i64 row = warp_row();
  int lane = threadIdx.x % WARP;
  if (row >= rows) return;
  Dropout dropout{seed, first, threshold, width};
  float value[MAX_PACKS][PACK], sum = 0.0f, squares = 0.0f;
#pragma unroll
  for (int k = 0; k < MAX_PACKS; k++) {
    int column = (k * WARP + lane) * PACK;
    if (column >= width) break;
    float shortcut[PACK];
    load(value[k], x + row * width, column, width);
    load(shortcut, residual + row * width, column, width);
    dropout.apply(value[k], row, column);
#pragma unroll
    for (int i = 0; i < PACK; i++) {
      value[k][i] = (float)(real)(value[k][i] + shortcut[i]);
      sum += value[k][i];
    }
    store(h + row * width, column, width, value[k]);
  }
  float mean = warp_sum(sum) / width;
#pragma unroll
  for (int k = 0; k < MAX_PACKS; k++) {
    int column = (k * WARP + lane) * PACK;
#pragma unroll
    for (int i = 0; i < PACK; i++) {
      if (column + i >= width) break;
      value[k][i] -= mean;
      squares += value[k][i] * value[k][i];
    }
  }
  float inverse = 1.0f / sqrtf(warp_sum(squares) / width + epsilon);
#pragma unroll
  for (int k = 0; k < MAX_PACKS; k++) {
    int column = (k * WARP + lane) * PACK;
    if (column >= width) break;
#pragma unroll
    for (int i = 0; i < PACK; i++) {
      if (column + i < width)
        value[k][i] = value[k][i] * inverse * gain[column + i] + bias[column + i];
    }
    store(out + row * width, column, width, value[k]);
  }
  if (lane == 0) {
    means[row] = mean;
    inverses[row] = inverse;
  }
}

// With n = (h - mean) / deviation and dn = g * gain:
// dresidual = (dn - mean(dn) - n * mean(dn * n)) / deviation, dx = Dropout(dresidual);
// without dropout dx is null. Launch: a warp a row.
extern "C" __global__ void layer_norm_backward(real* dx, real* dresidual, const real* g,
                                               const real* h, const float* means,
                                               const float* inverses, const float* gain,
                                               i64 rows, int width, const u64* seed,
                                               u64 first, int threshold) {
  i64 row = warp_row();
  int lane = threadIdx.x % WARP;
  if (row >= rows) return;
  float mean = means[row], inverse = inverses[row];
  float normal[MAX_PACKS][PACK], dnormal[MAX_PACKS][PACK];
  float sum = 0.0f, product = 0.0f;
#pragma unroll
  for (int k = 0; k < MAX_PACKS; k++) {
    int column = (k * WARP + lane) * PACK;
    if (column >= width) break;
    load(normal[k], h + row * width, column, width);
    load(dnormal[k], g + row * width, column, width);
#pragma unroll
    for (int i = 0; i < PACK; i++) {
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
  for (int k = 0; k < MAX_PACKS; k++) {
    int column = (k * WARP + lane) * PACK;
    if (column >= width) break;
#pragma unroll
    for (int i = 0; i < PACK; i++)
      dnormal[k][i] = (dnormal[k][i] - sum - normal[k][i] * product) * inverse;
    store(dresidual + row * width, column, width, dnormal[k]);
    if (dx == nullptr) continue;
    dropout.apply(dnormal[k], row, column);
    store(dx + row * width, column, width, dnormal[k]);
  }
}

// Partial column sums of g * n and of g: dgain and dbias. Launch: as sum_columns.
extern "C" __global__ void norm_parameters(float* partial, const real* g, const real* h,
                                           const float* means, const float* inverses,
                                           i64 rows, int width) {
  sum_columns<2>(partial, rows, width, [&](float (&x)[2][PACK], i64 row, int column) {
    load(x[0], h + row * width, column, width);
    load(x[1], g + row * width, column, width);
    float mean = means[row], inverse = inverses[row];
#pragma unroll
    for (int i = 0; i < PACK; i++) x[0][i] = (x[0][i] - mean) * inverse * x[1][i];
  });
}

// ---------------------------------------------------------------------------------
// Attention (equation 1). Scores of a query lie in a row, rows `stride` apart.

// Where the matrices of three batches begin: out[0] for a, out[1] for b, out[2] for c.
// Matrix (o, i) lies o * outer step + i * inner step bytes after the first.
// Launch: a thread a matrix.
extern "C" __global__ void pointers(u64* out, int outer, int inner, u64 a, i64 a_outer,
                                    i64 a_inner, u64 b, i64 b_outer, i64 b_inner, u64 c,
                                    i64 c_outer, i64 c_inner) {
  i64 index = thread_index(), count = (i64)outer * inner;
  if (index >= count) return;
  i64 o = index / inner, i = index % inner;
  out[index] = a + o * a_outer + i * a_inner;
  out[index + count] = b + o * b_outer + i * b_inner;
  out[index + 2 * count] = c + o * c_outer + i * c_inner;
}

// scores = softmax(scores), with `masked` added to the scores that the mask forbids.
// The mask is read at b * step_b + h * step_h + t * step_t + s * step_s: a step of 0
// serves an axis for which all is the same. Launch: a warp a row (b, h, t).
extern "C" __global__ void softmax(real* scores, const bool* mask, int step_b,
                                   int step_h, int step_t, int step_s, float masked,
                                   i64 rows, int heads, int queries, int keys,
                                   int stride) {
  i64 row = warp_row();
  int lane = threadIdx.x % WARP;
  if (row >= rows) return;
  int t = row % queries, h = row / queries % heads, b = row / queries / heads;
  if (mask != nullptr) mask += (i64)b * step_b + (i64)h * step_h + (i64)t * step_t;
  scores += row * stride;
  auto score = [&](int s) {
    bool allowed = mask == nullptr || mask[(i64)s * step_s];
    return (float)scores[s] + (allowed ? 0.0f : masked);
  };
  ExpSum sum{LOWEST, 0.0f};
  for (int s = lane; s < keys; s += WARP) sum.add(score(s));
  sum = warp_exp_sum(sum);
  for (int s = lane; s < keys; s += WARP)
    scores[s] = (real)(expf(score(s) - sum.highest) / sum.total);
}

// dscores = (dweights - sum(dweights * weights)) * weights, in place over dweights,
// through which dropout is taken first. Launch: a warp a row.
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
  for (int column = lane * PACK; column < keys; column += WARP * PACK) {
    float d[PACK], w[PACK];
    load(d, dweights, column, keys);
    load(w, weights, column, keys);
    dropout.apply(d, row, column);
#pragma unroll
    for (int i = 0; i < PACK; i++) sum += d[i] * w[i];
  }
  sum = warp_sum(sum);
  for (int column = lane * PACK; column < keys; column += WARP * PACK) {
    float d[PACK], w[PACK];
    load(d, dweights, column, keys);
    load(w, weights, column, keys);
    dropout.apply(d, row, column);
#pragma unroll
    for (int i = 0; i < PACK; i++) d[i] = (d[i] - sum) * w[i];
    store(dweights, column, keys, d);
  }
}

// ---------------------------------------------------------------------------------
// The label-smoothed loss (sections 3.4 and 5.4)

// With p = softmax(logits) and q = confidence * one-hot + smoothing:
// loss = -sum(q * log p), logits = p - q in place; both 0 where the target is padding.
// Launch: a block a row.
extern "C" __global__ void cross_entropy(real* logits, float* losses,
                                         const int* targets, float confidence,
                                         float smoothing, int padding, int width,
                                         int stride) {
  i64 row = blockIdx.x;
  int target = targets[row], step = blockDim.x * PACK;
  logits += row * stride;
  if (target == padding) {
    float zero[PACK] = {};
    for (int column = threadIdx.x * PACK; column < width; column += step)
      store(logits, column, width, zero);
    if (threadIdx.x == 0) losses[row] = 0.0f;
    return;
  }
  ExpSum sum{LOWEST, 0.0f};
  float logit_sum = 0.0f, target_logit = (float)logits[target];
  for (int column = threadIdx.x * PACK; column < width; column += step) {
    float x[PACK];
    load(x, logits, column, width);
#pragma unroll
    for (int i = 0; i < PACK; i++) {
      if (column + i >= width) break;
      sum.add(x[i]);
      logit_sum += x[i];
    }
  }
  __shared__ ExpSum sums[WARPS];
  sum = warp_exp_sum(sum);
  if (threadIdx.x % WARP == 0) sums[threadIdx.x / WARP] = sum;
  logit_sum = block_sum(logit_sum);
  sum = sums[0];
  for (int i = 1; i < WARPS; i++) sum = joined(sum, sums[i]);
  for (int column = threadIdx.x * PACK; column < width; column += step) {
    float x[PACK];
    load(x, logits, column, width);
#pragma unroll
    for (int i = 0; i < PACK; i++) {
      float q = smoothing + (column + i == target ? confidence : 0.0f);
      x[i] = expf(x[i] - sum.highest) / sum.total - q;
    }
    store(logits, column, width, x);
  }
  if (threadIdx.x == 0) {
    float log_total = logf(sum.total) + sum.highest;
    losses[row] = log_total - confidence * target_logit - smoothing * logit_sum;
  }
}

// out[0] = the sum of `count` numbers. Launch: one block.
extern "C" __global__ void sum_all(float* out, const float* values, int count) {
  float sum = 0.0f;
  for (int i = threadIdx.x; i < count; i += blockDim.x) sum += values[i];
  sum = block_sum(sum);
  if (threadIdx.x == 0) *out = sum;
}

// x = x * factor[0], in place. Launch: a thread a pack.
extern "C" __global__ void scale(real* x, const float* factor, i64 count) {
  i64 start = thread_index() * PACK;
  if (start >= count) return;
  int width = count - start < PACK ? count - start : PACK;
  float value[PACK];
  load(value, x + start, 0, width);
#pragma unroll
  for (int i = 0; i < PACK; i++) value[i] *= *factor;
  store(x + start, 0, width, value);
}

// out = a + b; out may be a. Launch: a thread a pack.
extern "C" __global__ void accumulate(real* out, const real* a, const real* b,
                                      i64 count) {
  i64 start = thread_index() * PACK;
  if (start >= count) return;
  int width = count - start < PACK ? count - start : PACK;
  float value[PACK], other[PACK];
  load(value, a + start, 0, width);
  load(other, b + start, 0, width);
#pragma unroll
  for (int i = 0; i < PACK; i++) value[i] += other[i];
  store(out + start, 0, width, value);
}

// out = x as float. Launch: a thread an element.
extern "C" __global__ void widen(float* out, const real* x, i64 count) {
  i64 i = thread_index();
  if (i < count) out[i] = (float)x[i];
}

// ---------------------------------------------------------------------------------
// Beam search (section 6.1). The order of candidates: the higher value first, the lower
// index among equals.

struct Candidate {
  float value;
  int index;

  __device__ bool before(Candidate other) const {
    return value > other.value || (value == other.value && index < other.index);
  }
};

__device__ Candidate warp_first(Candidate own) {
#pragma unroll
  for (int step = WARP / 2; step > 0; step /= 2) {
    Candidate other{__shfl_xor_sync(0xffffffff, own.value, step),
                    __shfl_xor_sync(0xffffffff, own.index, step)};
    if (other.before(own)) own = other;
  }
  return own;
}

// The first `count` tokens of each row of logits, with their values, and log_totals =
// log(sum(exp(logits))). Tokens `never` and `nor` count in the sum alone; where too few
// are left, the value is -infinity. Launch: a block a row.
extern "C" __global__ void best_tokens(float* values, int* tokens, float* log_totals,
                                       const real* logits, int count, int never,
                                       int nor, int width) {
  __shared__ ExpSum sums[WARPS];
  __shared__ Candidate firsts[WARPS];
  i64 row = blockIdx.x;
  logits += row * width;
  ExpSum sum{LOWEST, 0.0f};
  for (int i = threadIdx.x; i < width; i += blockDim.x) sum.add((float)logits[i]);
  sum = warp_exp_sum(sum);
  if (threadIdx.x % WARP == 0) sums[threadIdx.x / WARP] = sum;
  Candidate last{INFINITY, -1};
  for (int k = 0; k < count; k++) {
    Candidate first{-INFINITY, 0x7fffffff};
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
      Candidate here{(float)logits[i], i};
      if (i != never && i != nor && last.before(here) && here.before(first))
        first = here;
    }
    first = warp_first(first);
    if (threadIdx.x % WARP == 0) firsts[threadIdx.x / WARP] = first;
    __syncthreads();
    for (int i = 0; i < WARPS; i++)
      if (firsts[i].before(first)) first = firsts[i];
    __syncthreads();
    if (threadIdx.x == 0) {
      values[row * count + k] = first.value;
      tokens[row * count + k] = first.index;
    }
    last = first;
  }
  if (threadIdx.x > 0) return;
  for (int i = 1; i < WARPS; i++) sum = joined(sum, sums[i]);
  log_totals[row] = logf(sum.total) + sum.highest;
}

// The best hypotheses that have ended, best first, `room` a sentence: score, log-
// probability, and the step and beam where the last token before EOS is found.
struct Finished {
  double* scores;
  double* log_probs;
  int* steps;
  int* beams;
  int* counts;
  int room;

  __device__ void add(int sentence, double score, double log_prob, int step, int beam) {
    int held = counts[sentence]++, place = held < room ? held : room;
    i64 start = (i64)sentence * room;
    while (place > 0 && scores[start + place - 1] < score) {
      if (place < room) {
        scores[start + place] = scores[start + place - 1];
        log_probs[start + place] = log_probs[start + place - 1];
        steps[start + place] = steps[start + place - 1];
        beams[start + place] = beams[start + place - 1];
      }
      place--;
    }
    if (place == room) return;
    scores[start + place] = score;
    log_probs[start + place] = log_prob;
    steps[start + place] = step;
    beams[start + place] = beam;
  }
};

// cache[row, position] = the row of `latest`. Launch: a thread an element.
extern "C" __global__ void put_position(real* cache, const real* latest,
                                        const int* position, int count, int capacity,
                                        int width) {
  i64 i = thread_index();
  if (i >= count) return;
  i64 row = i / width, column = i % width;
  cache[(row * capacity + *position) * width + column] = latest[i];
}

// One step of the search, as decoding.py describes it. Of a sentence's beams x count
// candidates the first `count` are looked at: those that end are finished hypotheses if
// they are among the first `live`, and the first `live` of the others go on, as their
// log-probabilities, beams of origin (and rows, among all sentences) and tokens. `done`
// says which sentences need no further step; those that were done have no beams.
// Launch: a warp a sentence, in blocks of 32 threads.
extern "C" __global__ void beam_step(
    double* next, int* origins, int* rows, int* chosen, bool* done, double* end_scores,
    double* end_log_probs, int* end_steps, int* end_beams, int* end_counts, int room,
    const double* log_probs, const float* values, const int* tokens,
    const float* log_totals, const int* sentences, const int* limits,
    const double* penalties, int beams, int live, int count, int step, int end) {
  int b = blockIdx.x, lane = threadIdx.x, sentence = sentences[b], going_on = 0;
  Finished finished{end_scores, end_log_probs, end_steps, end_beams, end_counts, room};
  next += b * live, origins += b * live, rows += b * live, chosen += b * live;
  values += b * beams * count, tokens += b * beams * count;
  log_probs += b * beams, log_totals += b * beams;
  double last = INFINITY;
  int last_index = -1;
  for (int k = 0; k < count && !done[b]; k++) {
    double first = -INFINITY;
    int index = 0x7fffffff;
    for (int i = lane; i < beams * count; i += WARP) {
      double here = values[i] + (log_probs[i / count] - log_totals[i / count]);
      bool later = here < last || (here == last && i > last_index);
      if (later && here > first) first = here, index = i;
    }
    for (int to = WARP / 2; to > 0; to /= 2) {
      double other = __shfl_xor_sync(0xffffffff, first, to);
      int other_index = __shfl_xor_sync(0xffffffff, index, to);
      if (other > first || (other == first && other_index < index))
        first = other, index = other_index;
    }
    last = first, last_index = index;
    if (lane > 0 || first == -INFINITY) continue;
    if (tokens[index] != end && going_on < live) {
      next[going_on] = first;
      origins[going_on] = index / count;
      chosen[going_on++] = tokens[index];
    } else if (tokens[index] == end && k < live) {
      finished.add(sentence, first / penalties[step], first, step - 1, index / count);
    }
  }
  if (lane > 0) return;
  for (int k = going_on; k < live; k++) next[k] = -INFINITY, origins[k] = chosen[k] = 0;
  for (int k = 0; k < live; k++) rows[k] = b * beams + origins[k];
  if (done[b]) return;
  bool at_limit = step == limits[sentence];
  bool none = end_counts[sentence] == 0;
  for (int k = 0; at_limit && none && k < going_on; k++)
    finished.add(sentence, next[k] / penalties[step], next[k], step, k);
  // A log-probability only falls, so this bounds what a live beam can reach.
  double reachable = next[0] / penalties[limits[sentence]];
  int held = end_counts[sentence];
  double to_beat = held >= room ? end_scores[sentence * room + room - 1] : -INFINITY;
  done[b] = at_limit || held >= live || to_beat >= reachable || next[0] == -INFINITY;
}

// ---------------------------------------------------------------------------------
// The update (section 5.3)

// partial[block] = the sum of squares of this block's share of the gradient.
// Launch: as many blocks as partial sums.
extern "C" __global__ void square_sums(float* partial, const float* gradient,
                                       i64 count) {
  float sum = 0.0f;
  for (i64 i = thread_index(); i < count; i += (i64)gridDim.x * blockDim.x)
    sum += gradient[i] * gradient[i];
  sum = block_sum(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// norm = (the root of the sum of the partial sums, 1 if it is finite, else 0).
// Launch: one block.
extern "C" __global__ void gradient_norm(float* norm, const float* partial, int count) {
  float sum = 0.0f;
  for (int i = threadIdx.x; i < count; i += blockDim.x) sum += partial[i];
  sum = block_sum(sum);
  if (threadIdx.x > 0) return;
  norm[0] = sqrtf(sum);
  norm[1] = isfinite(sum) ? 1.0f : 0.0f;
}

// What the host sets before each update.
struct Scalars {
  float rate, beta1, beta2, epsilon;
  float correction1, correction2;  // 1 - beta1^t, 1 - beta2^t
  float scale, clip;               // of the gradient; of its norm, 0 for none
};

// mean = beta1 mean + (1 - beta1) g, square = beta2 square + (1 - beta2) g^2,
// parameter -= rate (mean / correction1) / (sqrt(square / correction2) + epsilon) where
// g is the gradient scaled and clipped; and the parameter again as `real` in half, if
// that is not null. Nothing happens where the norm is not finite.
// Launch: a thread a parameter.
extern "C" __global__ void adam(float* parameters, const float* gradient, float* mean,
                                float* square, real* half, const Scalars* scalars,
                                const float* norm, i64 count) {
  i64 i = thread_index();
  if (i >= count || norm[1] == 0.0f) return;
  Scalars s = *scalars;
  float length = norm[0] * s.scale;
  float clipping = s.clip > 0.0f && length > s.clip ? s.clip / length : 1.0f;
  float g = gradient[i] * s.scale * clipping;
  float m = mean[i] = s.beta1 * mean[i] + (1.0f - s.beta1) * g;
  float v = square[i] = s.beta2 * square[i] + (1.0f - s.beta2) * g * g;
  float root = sqrtf(v / s.correction2) + s.epsilon;
  float parameter = parameters[i] -= s.rate / s.correction1 * m / root;
  if (half != nullptr) half[i] = (real)parameter;
}

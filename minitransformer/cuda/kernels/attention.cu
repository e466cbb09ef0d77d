// Attention (equation 1) in one kernel each way; no score is ever in memory.
//
// A block takes the queries and keys of one sentence and head in tiles of SIZE x SIZE,
// so that sentences may be of any length: the softmax is a running one, as in "Online
// normalizer calculation for softmax" (Milakov and Gimelshein, 2018) and FlashAttention
// (Dao et al., 2022). Heads are at most WIDTH wide, for keys as for values.
//
// Shapes: q, dq [B, T, H d_k], k, dk [B, S, H d_k], v, dv [B, S, H d_v], out, g, of
// which out is the result and g its gradient [B, T, H d_v], rows a multiple of H long;
// statistics [2, B, H, T]

template <int WIDTH>
struct Sizes {
  static constexpr int SIZE = (WIDTH == 64 ? 4 : 2) * VECTOR;  // 32, 16 or 8
  static constexpr int GROUPS = SIZE / 8;  // of 8 columns of a row of scores
  // From a row of a tile to the next, so that few threads meet in a bank of memory:
  static constexpr int LINE = WIDTH + 8;   // of q, k, v or g
  static constexpr int SUMS = WIDTH + 2;   // of sums of these, in float
  static constexpr int SHORT = SIZE + 2;   // of weights
  static constexpr int SCORES = SIZE + 1;  // of scores, in float
};

// The mask's element (b, h, t, s) allows a key. A stride of 0 broadcasts.
struct Mask {
  const bool* allowed;
  int stride_b, stride_h, stride_t, stride_s;

  __device__ const bool* row(int b, int h, int t) const {
    if (allowed == nullptr) return nullptr;
    return allowed + (i64)b * stride_b + (i64)h * stride_h + (i64)t * stride_t;
  }
};

// Turn products of a query with 8 keys from `key` on into scores, -infinity beyond the
// last key.
__device__ void scores_of(float (&x)[8], const float* products, float scale,
                          const bool* allowed, int stride, float masked_score, int key,
                          int keys) {
  for (int i = 0; i < 8; i++) {
    int s = key + i;
    bool masked = allowed != nullptr && s < keys && !allowed[(i64)s * stride];
    x[i] = products[i] * scale + (masked ? masked_score : 0.0f);
    if (s >= keys) x[i] = -INFINITY;
  }
}

// out = sum over s of Dropout(w)[s] v[s], with w[s] = exp(score[s] - maximum) / total;
// score = q k scale, plus `masked_score` where the mask forbids a key. For each tile of
// keys the maximum rises and what was summed is multiplied by exp(old - new maximum).
// Statistics are the maximum and 1 / total, which backward reads. One block of 128
// threads for each (b, h) and tile of queries. Strides are in elements.
template <int WIDTH>
__device__ void attend(real* out, float* statistics, const real* q, i64 q_batch,
                       i64 q_row, const real* k, i64 k_batch, i64 k_row, const real* v,
                       i64 v_batch, i64 v_row, Mask mask, float masked_score,
                       float scale, int heads, int queries, int keys, int d_k, int d_v,
                       Dropout dropout) {
  using S = Sizes<WIDTH>;
  constexpr int SIZE = S::SIZE, LINE = S::LINE, SUMS = S::SUMS;
  constexpr int SHORT = S::SHORT, SCORES = S::SCORES;
  alignas(16) __shared__ real q_tile[SIZE * LINE], k_tile[SIZE * LINE],
      v_tile[SIZE * LINE], weights[SIZE * SHORT];
  __shared__ float scores[SIZE * SCORES], sums[SIZE * SUMS];
  __shared__ float maximum[SIZE], total[SIZE], correction[SIZE];
  int b = blockIdx.x / heads, h = blockIdx.x % heads, first = blockIdx.y * SIZE;
  int depth = whole_steps(d_k), columns = whole_steps(d_v);
  q += b * q_batch + h * d_k, k += b * k_batch + h * d_k, v += b * v_batch + h * d_v;
  load_tile<SIZE>(q_tile, LINE, q, q_row, first, queries, d_k, depth);
  for (int i = threadIdx.x; i < SIZE * SUMS; i += TILE_THREADS) sums[i] = 0.0f;
  for (int i = threadIdx.x; i < SIZE; i += TILE_THREADS)
    maximum[i] = LOWEST, total[i] = 0.0f;
  bool active = threadIdx.x < SIZE * S::GROUPS;
  int row = active ? threadIdx.x / S::GROUPS : 0, group = threadIdx.x % S::GROUPS * 8;
  int t = min(first + row, queries - 1);
  i64 line = (i64)blockIdx.x * queries + t;  // of all rows of scores
  for (int start = 0; start < keys; start += SIZE) {
    __syncthreads();
    load_tile<SIZE>(k_tile, LINE, k, k_row, start, keys, d_k, depth);
    load_tile<SIZE>(v_tile, LINE, v, v_row, start, keys, d_v, columns);
    __syncthreads();
    multiply_tiles(scores, SCORES, Tile<false>{q_tile, LINE}, Tile<true>{k_tile, LINE},
                   SIZE, SIZE, depth, false);
    __syncthreads();
    float x[8], old = maximum[row], highest = old, sum = 0.0f;
    scores_of(x, scores + row * SCORES + group, scale, mask.row(b, h, t), mask.stride_s,
              masked_score, start + group, keys);
    for (int i = 0; i < 8; i++) highest = fmaxf(highest, x[i]);
    for (int step = S::GROUPS / 2; step > 0; step /= 2)
      highest = fmaxf(highest, __shfl_xor_sync(0xffffffff, highest, step));
    for (int i = 0; i < 8; i++) sum += x[i] = expf(x[i] - highest);
    for (int step = S::GROUPS / 2; step > 0; step /= 2)
      sum += __shfl_xor_sync(0xffffffff, sum, step);
    dropout.apply(x, line, start + group);
    if (active) {
      for (int i = 0; i < 8; i++) weights[row * SHORT + group + i] = (real)x[i];
      if (group == 0) {
        correction[row] = expf(old - highest);
        total[row] = total[row] * correction[row] + sum;
        maximum[row] = highest;
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < SIZE * columns; i += TILE_THREADS)
      sums[i / columns * SUMS + i % columns] *= correction[i / columns];
    __syncthreads();
    multiply_tiles(sums, SUMS, Tile<false>{weights, SHORT}, Tile<false>{v_tile, LINE},
                   SIZE, columns, SIZE, true);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < SIZE * d_v; i += TILE_THREADS) {
    int r = i / d_v, query = first + r;
    if (query < queries)
      out[(((i64)b * queries + query) * heads + h) * d_v + i % d_v] =
          (real)(sums[r * SUMS + i % d_v] / total[r]);
  }
  i64 rows = (i64)gridDim.x * queries;
  for (int r = threadIdx.x; r < SIZE && first + r < queries; r += TILE_THREADS) {
    i64 place = (i64)blockIdx.x * queries + first + r;
    statistics[place] = maximum[r], statistics[rows + place] = 1.0f / total[r];
  }
}

// With w as above and dw[t, s] = g[t] v[s]:
// dv[s] = sum over t of Dropout(w)[t, s] g[t],
// dscore = w (Dropout(dw) - g[t] out[t]),
// dq[t] = scale sum over s of dscore k[s], dk[s] = scale sum over t of dscore q[t].
// Weights are computed again from the statistics. One block of 128 threads for each
// (b, h); with several tiles of keys, dq is summed in `dq_sums` [B, T, H d_k], in order.
template <int WIDTH>
__device__ void attend_backward(
    real* dq, real* dk, real* dv, float* dq_sums, const float* statistics, const real* g,
    const real* out, const real* q, i64 q_batch, i64 q_row, const real* k, i64 k_batch,
    i64 k_row, const real* v, i64 v_batch, i64 v_row, Mask mask, float masked_score,
    float scale, int heads, int queries, int keys, int d_k, int d_v, Dropout dropout) {
  using S = Sizes<WIDTH>;
  constexpr int SIZE = S::SIZE, LINE = S::LINE, SUMS = S::SUMS;
  constexpr int SHORT = S::SHORT, SCORES = S::SCORES;
  constexpr int WORK = SIZE * (2 * SCORES > SUMS ? 2 * SCORES : SUMS);
  alignas(16) __shared__ real q_tile[SIZE * LINE], k_tile[SIZE * LINE],
      v_tile[SIZE * LINE], g_tile[SIZE * LINE], weights[SIZE * SHORT],
      dscores[SIZE * SHORT];
  __shared__ float work[WORK], dk_sums[SIZE * SUMS], dv_sums[SIZE * SUMS];
  float *scores = work, *dweights = work + SIZE * SCORES, *dq_tile = work;
  int b = blockIdx.x / heads, h = blockIdx.x % heads;
  int depth = whole_steps(d_k), columns = whole_steps(d_v);
  i64 rows = (i64)gridDim.x * queries, value_row = (i64)heads * d_v;
  i64 key_row = (i64)heads * d_k;
  q += b * q_batch + h * d_k, k += b * k_batch + h * d_k, v += b * v_batch + h * d_v;
  g += b * queries * value_row + h * d_v, out += b * queries * value_row + h * d_v;
  dq += b * queries * key_row + h * d_k, dk += b * keys * key_row + h * d_k;
  dv += b * keys * value_row + h * d_v;
  if (dq_sums != nullptr) dq_sums += b * queries * key_row + h * d_k;
  bool active = threadIdx.x < SIZE * S::GROUPS;
  int row = active ? threadIdx.x / S::GROUPS : 0, group = threadIdx.x % S::GROUPS * 8;
  for (int start = 0; start < keys; start += SIZE) {
    __syncthreads();
    load_tile<SIZE>(k_tile, LINE, k, k_row, start, keys, d_k, depth);
    load_tile<SIZE>(v_tile, LINE, v, v_row, start, keys, d_v, columns);
    for (int i = threadIdx.x; i < SIZE * SUMS; i += TILE_THREADS)
      dk_sums[i] = dv_sums[i] = 0.0f;
    for (int first = 0; first < queries; first += SIZE) {
      __syncthreads();
      load_tile<SIZE>(q_tile, LINE, q, q_row, first, queries, d_k, depth);
      load_tile<SIZE>(g_tile, LINE, g, value_row, first, queries, d_v, columns);
      __syncthreads();
      float dot = 0.0f;  // of the row's g and out, by the threads that share the row
      for (int c = threadIdx.x % S::GROUPS; c < d_v; c += S::GROUPS)
        dot += (float)g_tile[row * LINE + c] *
               (float)out[min(first + row, queries - 1) * value_row + c];
      for (int step = S::GROUPS / 2; step > 0; step /= 2)
        dot += __shfl_xor_sync(0xffffffff, dot, step);
      Tile<true> keys_of{k_tile, LINE}, values_of{v_tile, LINE};
      multiply_tiles(scores, SCORES, Tile<false>{q_tile, LINE}, keys_of, SIZE, SIZE,
                     depth, false);
      multiply_tiles(dweights, SCORES, Tile<false>{g_tile, LINE}, values_of, SIZE, SIZE,
                     columns, false);
      __syncthreads();
      int t = min(first + row, queries - 1);
      i64 line = (i64)blockIdx.x * queries + t;
      float x[8], d[8], maximum = statistics[line], inverse = statistics[rows + line];
      scores_of(x, scores + row * SCORES + group, scale, mask.row(b, h, t),
                mask.stride_s, masked_score, start + group, keys);
      for (int i = 0; i < 8; i++) {
        x[i] = first + row < queries ? expf(x[i] - maximum) * inverse : 0.0f;
        d[i] = dweights[row * SCORES + group + i];
      }
      dropout.apply(d, line, start + group);
      for (int i = 0; i < 8; i++) d[i] = x[i] * (d[i] - dot);
      dropout.apply(x, line, start + group);
      for (int i = 0; active && i < 8; i++) {
        weights[row * SHORT + group + i] = (real)x[i];
        dscores[row * SHORT + group + i] = (real)d[i];
      }
      __syncthreads();
      multiply_tiles(dv_sums, SUMS, Tile<true>{weights, SHORT},
                     Tile<false>{g_tile, LINE}, SIZE, columns, SIZE, true);
      multiply_tiles(dk_sums, SUMS, Tile<true>{dscores, SHORT},
                     Tile<false>{q_tile, LINE}, SIZE, depth, SIZE, true);
      multiply_tiles(dq_tile, SUMS, Tile<false>{dscores, SHORT},
                     Tile<false>{k_tile, LINE}, SIZE, depth, SIZE, false);
      __syncthreads();
      for (int i = threadIdx.x; i < SIZE * d_k; i += TILE_THREADS) {
        int r = i / d_k, c = i % d_k;
        if (first + r >= queries) continue;
        i64 place = (first + r) * key_row + c;
        float sum = dq_tile[r * SUMS + c] * scale;
        if (start > 0) sum += dq_sums[place];
        if (start + SIZE < keys) dq_sums[place] = sum;
        else dq[place] = (real)sum;
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < SIZE * SUMS; i += TILE_THREADS) {
      int r = i / SUMS, c = i % SUMS;
      if (start + r >= keys) continue;
      if (c < d_k) dk[(start + r) * key_row + c] = (real)(dk_sums[i] * scale);
      if (c < d_v) dv[(start + r) * value_row + c] = (real)dv_sums[i];
    }
  }
}

#define ATTENTION(WIDTH)                                                               \
  extern "C" __global__ void __launch_bounds__(128) attention_##WIDTH(                 \
      real* out, float* statistics, const real* q, i64 q_batch, i64 q_row,             \
      const real* k, i64 k_batch, i64 k_row, const real* v, i64 v_batch, i64 v_row,    \
      const bool* mask, int stride_b, int stride_h, int stride_t, int stride_s,        \
      float masked_score, float scale, int heads, int queries, int keys, int d_k,      \
      int d_v, const u64* seed, u64 first, int threshold) {                            \
    attend<WIDTH>(out, statistics, q, q_batch, q_row, k, k_batch, k_row, v, v_batch,   \
                  v_row, Mask{mask, stride_b, stride_h, stride_t, stride_s},           \
                  masked_score, scale, heads, queries, keys, d_k, d_v,                 \
                  Dropout{seed, first, threshold, keys});                              \
  }                                                                                    \
  extern "C" __global__ void __launch_bounds__(128) attention_backward_##WIDTH(        \
      real* dq, real* dk, real* dv, float* dq_sums, const float* statistics,           \
      const real* g, const real* out, const real* q, i64 q_batch, i64 q_row,           \
      const real* k, i64 k_batch, i64 k_row, const real* v, i64 v_batch, i64 v_row,    \
      const bool* mask, int stride_b, int stride_h, int stride_t, int stride_s,        \
      float masked_score, float scale, int heads, int queries, int keys, int d_k,      \
      int d_v, const u64* seed, u64 first, int threshold) {                            \
    attend_backward<WIDTH>(dq, dk, dv, dq_sums, statistics, g, out, q, q_batch, q_row, \
                           k, k_batch, k_row, v, v_batch, v_row,                       \
                           Mask{mask, stride_b, stride_h, stride_t, stride_s},         \
                           masked_score, scale, heads, queries, keys, d_k, d_v,        \
                           Dropout{seed, first, threshold, keys});                     \
  }

ATTENTION(64)
ATTENTION(128)

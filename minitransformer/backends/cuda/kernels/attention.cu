// Attention (equation 1) in one kernel each way; no score is ever in memory.
//
// A block takes the queries and keys of one sentence and head in tiles of SIZE x SIZE,
// so that sentences may be of any length: the softmax is a running one, as in "Online
// normalizer calculation for softmax" (Milakov and Gimelshein, 2018) and FlashAttention
// (Dao et al., 2022). Heads are at most WIDTH wide, for keys as for values. Of a tile,
// only the rows and keys that exist are computed, rounded up to 16.
//
// Shapes: q, dq [B, T, H d_k], k, dk [B, S, H d_k], v, dv [B, S, H d_v], out, g, of
// which out is the result and g its gradient [B, T, H d_v], rows a multiple of H long;
// statistics [2, B, H, T]. A sentence has less than 2^31 numbers.

template <int COLUMNS>
struct Sizes {
  static constexpr int WIDTH = COLUMNS;
  static constexpr int SIZE = (WIDTH == 64 ? 4 : 2) * VECTOR;  // 32, 16 or 8
  static constexpr int GROUPS = SIZE / 8;  // of 8 columns of a row of scores
  // From a row of a tile to the next, so that few threads meet in a bank of memory:
  static constexpr int LINE = WIDTH + 8;   // of q, k, v or g
  static constexpr int SHORT = SIZE + 8;   // of weights
  static constexpr int SCORES = SIZE + 4;  // of scores, in float
};

// How many blocks a multiprocessor must be able to run at a time, for which the
// compiler limits registers: as many as it can without spilling any.
#ifdef TENSOR_CORES
constexpr int BLOCKS = 7, BACKWARD_BLOCKS = 5;
#else
constexpr int BLOCKS = 5, BACKWARD_BLOCKS = 4;
#endif

// The numbers of a call. From one sentence, and from one of its rows, to the next there
// are `batch` and `row` elements of q, k and v. The mask's element (b, h, t, s) allows a
// key; a stride of 0 broadcasts, and keys lie side by side. Sentence b has
// counts[b * counts_batch] keys, or all where there are no counts.
struct AttentionSizes {
  int q_batch, q_row, k_batch, k_row, v_batch, v_row;
  int mask_batch, mask_head, mask_row, counts_batch;
  int queries, keys, d_k, d_v, dropout_threshold;
  float masked_score, scale;
  u64 dropout_first;
};

// The mask of a sentence and head; there may be none.
struct Mask {
  const bool* allowed;
  int stride;

  __device__ Mask(const bool* mask, const AttentionSizes& sizes, int b, int h)
      : allowed(mask), stride(sizes.mask_row) {
    if (mask != nullptr)
      allowed += (i64)b * sizes.mask_batch + (i64)h * sizes.mask_head;
  }

  __device__ const bool* row(int t) const {
    return allowed == nullptr ? nullptr : allowed + t * stride;
  }
};

// The scores of a row with 8 keys from `key` on, times LOG2_E, from their products;
// -infinity beyond the last key. `allowed` is the row of the mask, if there is one.
__device__ void scores_of(float (&x)[8], const float* products, float scale,
                          const bool* allowed, float masked_score, int key, int keys) {
  load_8(x, products);
  for (int i = 0; i < 8; i++) {
    bool there = key + i < keys, masked = allowed && there && !allowed[key + i];
    float bias = masked ? masked_score * LOG2_E : 0.0f;
    x[i] = x[i] * (scale * LOG2_E) + (there ? bias : -INFINITY);
  }
}

// out = sum over s of Dropout(w)[s] v[s], with w[s] = exp(score[s] - maximum) / total;
// score = q k scale, plus `masked_score` where the mask forbids a key. For each tile of
// keys the maximum rises and what was summed is multiplied by exp(old - new maximum).
// Statistics are the maximum, times LOG2_E, and 1 / total, which backward reads. One
// block of 128 threads for each head, sentence and tile of queries. Strides are in
// elements.
template <int WIDTH>
__device__ void attend(real* out, float* statistics, const real* q, const real* k,
                       const real* v, const bool* allowed, const int* counts,
                       const u64* seed, const AttentionSizes& sizes) {
  using S = Sizes<WIDTH>;
  using Rows = Tile<S::LINE, false>;
  using Columns = Tile<S::LINE, true>;
  constexpr int SIZE = S::SIZE, LINE = S::LINE, SHORT = S::SHORT, SCORES = S::SCORES;
  alignas(16) __shared__ real q_tile[SIZE * LINE], k_tile[SIZE * LINE],
      v_tile[SIZE * LINE], weights[SIZE * SHORT];
  alignas(16) __shared__ float scores[SIZE * SCORES];
  __shared__ float correction[SIZE], inverse[SIZE];
  int h = blockIdx.x, b = blockIdx.y, heads = gridDim.x, first = blockIdx.z * SIZE;
  int queries = sizes.queries, keys = sizes.keys, d_k = sizes.d_k, d_v = sizes.d_v;
  Dropout dropout{seed, sizes.dropout_first, sizes.dropout_threshold, keys};
  Mask mask(allowed, sizes, b, h);
  if (counts != nullptr) keys = min(keys, counts[b * sizes.counts_batch]);
  int depth = whole_steps(d_k), columns = whole_steps(d_v);
  int rows = rows_used<SIZE>(queries - first);
  q += (i64)b * sizes.q_batch + h * d_k, k += (i64)b * sizes.k_batch + h * d_k;
  v += (i64)b * sizes.v_batch + h * d_v;
  out += ((i64)b * queries + first) * heads * d_v + h * d_v;
  // Of the softmax, a thread computes 8 neighbours in a row of scores.
  int row = threadIdx.x / S::GROUPS, group = threadIdx.x % S::GROUPS * 8;
  int t = min(first + row, queries - 1);
  i64 before = ((i64)b * heads + h) * queries;  // of all rows of scores
  statistics += before, dropout.skip(before);
  float maximum = LOWEST, total = 0.0f;
  Sums<SIZE, WIDTH> sums;
  load_tile<S>(q_tile, q + first * sizes.q_row, sizes.q_row, rows, queries - first, d_k);
  for (int start = 0; start < keys; start += SIZE) {
    int used = rows_used<SIZE>(keys - start);
    if (start > 0) __syncthreads();
    load_tile<S>(k_tile, k + start * sizes.k_row, sizes.k_row, used, keys - start, d_k);
    load_tile<S>(v_tile, v + start * sizes.v_row, sizes.v_row, used, keys - start, d_v);
    wait_for_copies();
    __syncthreads();
    Sums<SIZE, SIZE> products;
    products.template add<WIDTH>(Rows{q_tile}, Rows{k_tile}, rows, used, depth);
    products.template store<SCORES>(scores, rows);
    __syncthreads();
    if (row < rows) {  // true for all lanes of a warp, or for none
      float x[8], highest = maximum, sum = 0.0f;
      scores_of(x, scores + row * SCORES + group, sizes.scale, mask.row(t),
                sizes.masked_score, start + group, keys);
      for (int i = 0; i < 8; i++) highest = fmaxf(highest, x[i]);
      highest = warp_max<S::GROUPS>(highest);
      for (int i = 0; i < 8; i++) sum += x[i] = exp2f(x[i] - highest);
      sum = warp_sum<S::GROUPS>(sum);
      float factor = exp2f(maximum - highest);
      total = total * factor + sum, maximum = highest;
      dropout.apply(x, t, start + group);
      store_8(weights + row * SHORT + group, x);
      if (group == 0) correction[row] = factor, inverse[row] = __fdividef(1.0f, total);
    }
    __syncthreads();
    if (start > 0)
      sums.each(rows, [&](int row, int, float& x, float& y) {
        x *= correction[row], y *= correction[row];
      });
    sums.template add<SIZE>(Tile<SHORT, false>{weights}, Columns{v_tile}, rows,
                            columns, used);
  }
  if (group == 0 && row < rows && first + row < queries) {
    statistics[t] = maximum;
    statistics[(i64)heads * gridDim.y * queries + t] = inverse[row];
  }
  sums.each(rows, [&](int row, int, float& x, float& y) {
    x *= inverse[row], y *= inverse[row];
  });
  sums.template store<LINE>(q_tile, rows);
  __syncthreads();
  store_tile<S>(out, heads * d_v, q_tile, queries - first, d_v);
}

// With w as above and dw[t, s] = g[t] v[s]:
// dv[s] = sum over t of Dropout(w)[t, s] g[t],
// dscore = w (Dropout(dw) - g[t] out[t]),
// dq[t] = scale sum over s of dscore k[s], dk[s] = scale sum over t of dscore q[t].
// Weights are computed again from the statistics. One block of 128 threads for each
// head and sentence; with several tiles of keys, dq is summed in `dq_sums`
// [B, T, H d_k], in order.
template <int WIDTH>
__device__ void attend_backward(real* dq, real* dk, real* dv, float* dq_sums,
                                const float* statistics, const real* g,
                                const real* out, const real* q, const real* k,
                                const real* v, const bool* allowed, const u64* seed,
                                const AttentionSizes& sizes) {
  using S = Sizes<WIDTH>;
  using Rows = Tile<S::LINE, false>;
  using Columns = Tile<S::LINE, true>;
  constexpr int SIZE = S::SIZE, LINE = S::LINE, SHORT = S::SHORT, SCORES = S::SCORES;
  alignas(16) __shared__ real q_tile[SIZE * LINE], k_tile[SIZE * LINE],
      v_tile[SIZE * LINE], g_tile[SIZE * LINE], weights[SIZE * SHORT],
      dscores[SIZE * SHORT], dq_tile[SIZE * LINE];
  alignas(16) __shared__ float scores[SIZE * SCORES], dweights[SIZE * SCORES];
  int h = blockIdx.x, b = blockIdx.y, heads = gridDim.x;
  int queries = sizes.queries, keys = sizes.keys, d_k = sizes.d_k, d_v = sizes.d_v;
  Dropout dropout{seed, sizes.dropout_first, sizes.dropout_threshold, keys};
  Mask mask(allowed, sizes, b, h);
  int depth = whole_steps(d_k), columns = whole_steps(d_v);
  int key_row = heads * d_k, value_row = heads * d_v;
  i64 before = ((i64)b * heads + h) * queries;
  i64 all_rows = (i64)heads * gridDim.y * queries;
  q += (i64)b * sizes.q_batch + h * d_k, k += (i64)b * sizes.k_batch + h * d_k;
  v += (i64)b * sizes.v_batch + h * d_v;
  g += (i64)b * queries * value_row + h * d_v;
  out += (i64)b * queries * value_row + h * d_v;
  dq += (i64)b * queries * key_row + h * d_k, dk += (i64)b * keys * key_row + h * d_k;
  dv += (i64)b * keys * value_row + h * d_v;
  if (dq_sums != nullptr) dq_sums += (i64)b * queries * key_row + h * d_k;
  int row = threadIdx.x / S::GROUPS, group = threadIdx.x % S::GROUPS * 8;
  statistics += before, dropout.skip(before);
  for (int start = 0; start < keys; start += SIZE) {
    int used = rows_used<SIZE>(keys - start);
    Sums<SIZE, WIDTH> dk_sums, dv_sums;
    if (start > 0) __syncthreads();
    load_tile<S>(k_tile, k + start * sizes.k_row, sizes.k_row, used, keys - start, d_k);
    load_tile<S>(v_tile, v + start * sizes.v_row, sizes.v_row, used, keys - start, d_v);
    for (int first = 0; first < queries; first += SIZE) {
      int rows = rows_used<SIZE>(queries - first);
      if (first > 0) __syncthreads();
      load_tile<S>(q_tile, q + first * sizes.q_row, sizes.q_row, rows, queries - first, d_k);
      load_tile<S>(g_tile, g + first * value_row, value_row, rows, queries - first,
                   d_v);
      wait_for_copies();
      __syncthreads();
      Sums<SIZE, SIZE> products, value_products;
      products.template add<WIDTH>(Rows{q_tile}, Rows{k_tile}, rows, used, depth);
      value_products.template add<WIDTH>(
          Rows{g_tile}, Rows{v_tile}, rows, used, columns);
      products.template store<SCORES>(scores, rows);
      value_products.template store<SCORES>(dweights, rows);
      __syncthreads();
      if (row < rows) {  // true for all lanes of a warp, or for none
        int t = min(first + row, queries - 1);
        float dot = 0.0f;  // of the row's g and out
        for (int c = group / 8 * VECTOR; c < d_v; c += S::GROUPS * VECTOR) {
          float x[VECTOR], y[VECTOR];
          load(x, out + t * value_row, c, d_v);
          load(y, g_tile + row * LINE, c, WIDTH);
          for (int i = 0; i < VECTOR; i++) dot += x[i] * y[i];
        }
        dot = warp_sum<S::GROUPS>(dot);
        // A row beyond the last query gets weights of 0, whatever its scores are.
        bool exists = first + row < queries;
        float x[8], d[8], maximum = exists ? statistics[t] : INFINITY;
        float inverse = exists ? statistics[all_rows + t] : 0.0f;
        scores_of(x, scores + row * SCORES + group, sizes.scale, mask.row(t),
                  sizes.masked_score, start + group, keys);
        load_8(d, dweights + row * SCORES + group);
        for (int i = 0; i < 8; i++) x[i] = exp2f(x[i] - maximum) * inverse;
        dropout.apply(d, t, start + group);
        for (int i = 0; i < 8; i++) d[i] = x[i] * (d[i] - dot);
        dropout.apply(x, t, start + group);
        store_8(weights + row * SHORT + group, x);
        store_8(dscores + row * SHORT + group, d);
      }
      __syncthreads();
      dv_sums.template add<SIZE>(Tile<SHORT, true>{weights}, Columns{g_tile},
                                 used, columns, rows);
      dk_sums.template add<SIZE>(Tile<SHORT, true>{dscores}, Columns{q_tile},
                                 used, depth, rows);
      Sums<SIZE, WIDTH> sums;
      sums.template add<SIZE>(Tile<SHORT, false>{dscores}, Columns{k_tile},
                              rows, depth, used);
      sums.each(rows, [&](int row, int column, float& x, float& y) {
        x *= sizes.scale, y *= sizes.scale;
        if (dq_sums != nullptr && first + row < queries && column < d_k) {
          float* place = dq_sums + (first + row) * key_row + column;
          if (start > 0) x += place[0];
          if (start > 0 && column + 1 < d_k) y += place[1];
          place[0] = x;
          if (column + 1 < d_k) place[1] = y;
        }
      });
      if (start + SIZE < keys) continue;
      sums.template store<LINE>(dq_tile, rows);
      __syncthreads();
      store_tile<S>(dq + first * key_row, key_row, dq_tile, queries - first, d_k);
    }
    __syncthreads();
    dk_sums.each(used, [&](int, int, float& x, float& y) {
      x *= sizes.scale, y *= sizes.scale;
    });
    dk_sums.template store<LINE>(q_tile, used);
    dv_sums.template store<LINE>(g_tile, used);
    __syncthreads();
    store_tile<S>(dk + start * key_row, key_row, q_tile, keys - start, d_k);
    store_tile<S>(dv + start * value_row, value_row, g_tile, keys - start, d_v);
  }
}

#define ATTENTION(WIDTH)                                                               \
  extern "C" __global__ void __launch_bounds__(128, BLOCKS) attention_##WIDTH(         \
      real* out, float* statistics, const real* q, const real* k, const real* v,       \
      const bool* mask, const int* counts, const u64* seed, AttentionSizes sizes) {    \
    attend<WIDTH>(out, statistics, q, k, v, mask, counts, seed, sizes);                \
  }                                                                                    \
  extern "C" __global__ void __launch_bounds__(128, BACKWARD_BLOCKS)                   \
      attention_backward_##WIDTH(                                                      \
          real* dq, real* dk, real* dv, float* dq_sums, const float* statistics,       \
          const real* g, const real* out, const real* q, const real* k, const real* v, \
          const bool* mask, const u64* seed, AttentionSizes sizes) {                   \
    attend_backward<WIDTH>(dq, dk, dv, dq_sums, statistics, g, out, q, k, v, mask,     \
                           seed, sizes);                                               \
  }

ATTENTION(64)
ATTENTION(128)

// Attention by batched products (equation 1), for heads that are wider than the tiles of
// attention.cu and for float32 with many keys. The scores of a query are a row, and rows
// begin `stride` elements apart.

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

// Embedding.

// out[n] = Dropout(table[ids[n]] * scale + positions[n % length]). One warp for each
// token.
// Shapes: out [N, D], table [V, D], ids [N], positions [length, D]; N = tokens
extern "C" __global__ void embedding(
    real* out, const real* table, const int* ids, const float* positions, float scale,
    int tokens, int length, int width, const u64* seed, u64 first, int threshold) {
  int token = warp_row();
  if (token >= tokens) return;
  const float* position = positions + (i64)(token % length) * width;
  for (int column = lane_column(); column < width; column += WARP * VECTOR) {
    float value[VECTOR], here[VECTOR];
    load(value, table + (i64)ids[token] * width, column, width);
    load_floats(here, position, column, width);
    for (int i = 0; i < VECTOR; i++) value[i] = value[i] * scale + here[i];
    Dropout{seed, first, threshold, width}.apply(value, token, column);
    store(out + (i64)token * width, column, width, value);
  }
}

// dtable[id] += scale * the sum of g[n] over all tokens n with that id. `sorted` has the
// tokens by id, the id in the upper half of a number and the token in the lower; tokens
// of negative ids are left out. One block for each token; only the block at the place of
// an id's first token has work. It finds the last token by leaps, as some ids have
// thousands. Each thread takes a vector of columns. Where a row is short, the block has
// threads for several rows at once: group i of them takes the tokens i, i + groups, ...
// Shapes: dtable [V, D], g [N, D], sorted [N]; N = tokens
extern "C" __global__ void embedding_backward(float* dtable, const real* g,
                                              const i64* sorted, float scale,
                                              int tokens, int width) {
  constexpr int THREADS = WARPS * WARP;
  __shared__ float sums[THREADS][VECTOR];
  auto id_at = [&](int place) { return (int)(sorted[place] >> 32); };
  int begin = blockIdx.x, id = id_at(begin), end = begin + 1, leap = 1;
  if (id < 0 || (begin > 0 && id_at(begin - 1) == id)) return;
  auto has = [&](int place) { return place < tokens && id_at(place) == id; };
  while (has(end + leap - 1)) end += leap, leap *= 2;
  for (; leap > 0; leap /= 2)
    if (has(end + leap - 1)) end += leap;
  int vectors = vectors_in(width) < THREADS ? vectors_in(width) : THREADS;
  int groups = THREADS / vectors, group = threadIdx.x / vectors;
  for (int start = 0; start < width; start += vectors * VECTOR) {
    int column = start + threadIdx.x % vectors * VECTOR;
    float sum[VECTOR] = {};
    auto add_rows = [&](auto read) {
#pragma unroll 8
      for (int i = begin + group; i < end; i += groups) {
        float x[VECTOR];
        read(x, g + (i64)(int)sorted[i] * width);
        for (int j = 0; j < VECTOR; j++) sum[j] += x[j];
      }
    };
    if (group < groups && column < width) {
      using Row = const real*;
      if (in_vectors(g, width, width))  // no branch, so that several are read at a time
        add_rows([&](auto& x, Row row) { unpack(x, *(const uint4*)(row + column)); });
      else
        add_rows([&](auto& x, Row row) { load(x, row, column, width); });
    }
    __syncthreads();
    for (int j = 0; j < VECTOR; j++) sums[threadIdx.x][j] = sum[j];
    __syncthreads();
    for (int j = 0; group == 0 && j < VECTOR && column + j < width; j++) {
      float total = 0.0f;
      for (int i = 0; i < groups; i++) total += sums[i * vectors + threadIdx.x][j];
      dtable[(i64)id * width + column + j] += total * scale;
    }
  }
}

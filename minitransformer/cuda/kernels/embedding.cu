// Embedding.

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

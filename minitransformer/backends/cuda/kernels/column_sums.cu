// Sums of columns.
// A matrix is summed over its rows in two stages. In the first, block (x, y) adds up a
// stripe of columns over the y-th of gridDim.y equal shares of the rows, which gives
// gridDim.y partial sums for each column, with one thread for each vector of a row, in
// blocks of 32 x 8 threads. The second stage adds these up. The backward pass of
// LayerNorm is a first stage, too.

// Add up a block's rows of threads, each thread with sums of SUMS quantities for the
// columns from `column` on, and write this block's partial sums.
// Shapes: partial [gridDim.y, SUMS, width]
template <int SUMS>
__device__ void store_partial(float* partial, const float (&sum)[SUMS][VECTOR],
                              int column, int width) {
  __shared__ float sums[WARPS * WARP][SUMS * VECTOR + 1];
  __syncthreads();
  for (int i = 0; i < SUMS * VECTOR; i++)
    sums[threadIdx.y * blockDim.x + threadIdx.x][i] = sum[i / VECTOR][i % VECTOR];
  __syncthreads();
  if (threadIdx.y >= SUMS) return;
  for (int i = 0; i < VECTOR && column + i < width; i++) {
    float total = 0.0f;
    for (int y = 0; y < (int)blockDim.y; y++)
      total += sums[y * blockDim.x + threadIdx.x][threadIdx.y * VECTOR + i];
    partial[((i64)blockIdx.y * SUMS + threadIdx.y) * width + column + i] = total;
  }
}

// Write this block's partial sums of each column. `read(x, row, column)` sets x to a
// vector.
// Shapes: partial [gridDim.y, width]
template <typename Read>
__device__ void sum_columns(float* partial, i64 rows, int width, Read read) {
  int column = (blockIdx.x * WARP + threadIdx.x) * VECTOR;
  i64 share = (rows + gridDim.y - 1) / gridDim.y, start = blockIdx.y * share;
  i64 end = start + share < rows ? start + share : rows;
  float sum[1][VECTOR] = {};
  if (column < width) {
    for (i64 row = start + threadIdx.y; row < end; row += WARPS) {
      float x[VECTOR];
      read(x, row, column);
      for (int i = 0; i < VECTOR; i++) sum[0][i] += x[i];
    }
  }
  store_partial(partial, sum, column, width);
}

// partial = sums of the columns of x: the first stage.
// Shapes: partial [gridDim.y, width], x [rows, width]
extern "C" __global__ void column_sums(float* partial, const real* x, i64 rows,
                                       int width) {
  sum_columns(partial, rows, width, [&](float (&y)[VECTOR], i64 row, int column) {
    load(y, x + row * width, column, width);
  });
}

// first += the sum of the rows of partial[:, 0], and with a second row of blocks,
// second += that of partial[:, 1]: the second stage. One thread for each column, in
// blocks of 32 x 32 threads, whose rows share the partial sums.
// Shapes: first, second [width], partial [count, gridDim.y, width]
extern "C" __global__ void add_partials(float* first, float* second,
                                        const float* partial, int count, int width) {
  __shared__ float sums[MAX_WARPS][WARP];
  int column = blockIdx.x * WARP + threadIdx.x, stride = gridDim.y * width;
  float sum = 0.0f;
  if (column < width) {
    partial += blockIdx.y * width + column;
#pragma unroll 4
    for (int row = threadIdx.y; row < count; row += MAX_WARPS)
      sum += partial[(i64)row * stride];
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || column >= width) return;
  float total = 0.0f;
  for (int y = 0; y < MAX_WARPS; y++) total += sums[y][threadIdx.x];
  (blockIdx.y == 0 ? first : second)[column] += total;
}

// Sums of columns.
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

// What all kernels share: types, vectors of 16 bytes, sums over warps and blocks.
//
// cuBLAS computes the matrix products, and the kernels of this folder everything else.
// `kernel_source` in device.py joins the files, this one first, and they are compiled
// once for each type of activations, REAL (float, __half or __nv_bfloat16). All
// arithmetic is in float, whatever the type in memory. Matrices are stored row by row,
// and threads read and write vectors of 16 bytes where a row's address allows it; the
// compiler unrolls loops over a vector's elements. Every sum has a fixed order, so equal
// inputs give equal bits.
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
constexpr int MAX_WARPS = 1024 / WARP;     // in the largest block
constexpr int VECTOR = 16 / sizeof(real);  // elements of a 16-byte vector
constexpr int MAX_WIDTH = 1024;            // of a row that a warp holds in registers
constexpr int MAX_VECTORS = MAX_WIDTH / (WARP * VECTOR);  // of such a row, a thread
constexpr float LOWEST = -3.402823466e38f;
constexpr float LOG2_E = 1.442695041f;  // exp(x) = exp2(x LOG2_E), and exp2 is fast


__device__ i64 thread_index() { return (i64)blockIdx.x * blockDim.x + threadIdx.x; }

// The row of the calling warp, in kernels with one warp for each row.
__device__ i64 warp_row() { return (i64)blockIdx.x * WARPS + threadIdx.x / WARP; }

// The column of the first vector that a lane takes of its warp's row.
__device__ int lane_column() { return threadIdx.x % WARP * VECTOR; }

__device__ int vectors_in(int width) { return (width + VECTOR - 1) / VECTOR; }

struct alignas(16) Vector {
  real element[VECTOR];
};

__device__ void unpack(float (&value)[VECTOR], const uint4& bits) {
  const real* element = (const real*)&bits;
  for (int i = 0; i < VECTOR; i++) value[i] = (float)element[i];
}

__device__ uint4 pack(const float (&value)[VECTOR]) {
  uint4 bits;
  real* element = (real*)&bits;
  for (int i = 0; i < VECTOR; i++) element[i] = (real)value[i];
  return bits;
}

// Whether rows of a matrix are whole vectors at addresses that allow reading them so.
__device__ bool in_vectors(const real* rows, int stride, int width) {
  return (size_t)rows % sizeof(Vector) == 0 && (stride | width) % VECTOR == 0;
}

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

// Read as many elements of a row of floats (a bias, a gain) as a vector has.
__device__ void load_floats(float (&value)[VECTOR], const float* row, int column,
                            int width) {
  const float* from = row + column;
  if (column + VECTOR <= width && (size_t)from % sizeof(float4) == 0) {
#pragma unroll
    for (int i = 0; i < VECTOR; i += 4) {
      float4 four = *(const float4*)(from + i);
      value[i] = four.x, value[i + 1] = four.y;
      value[i + 2] = four.z, value[i + 3] = four.w;
    }
  } else {
    for (int i = 0; i < VECTOR; i++) value[i] = column + i < width ? from[i] : 0.0f;
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

// The sum over a warp, or over THREADS neighbours in it, to each of them.
template <int THREADS = WARP>
__device__ float warp_sum(float x) {
#pragma unroll
  for (int step = THREADS / 2; step > 0; step /= 2)
    x += __shfl_xor_sync(0xffffffff, x, step);
  return x;
}

// The maximum over as many.
template <int THREADS = WARP>
__device__ float warp_max(float x) {
#pragma unroll
  for (int step = THREADS / 2; step > 0; step /= 2)
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, step));
  return x;
}

// Return the sum over the threads of a block, whole warps, to each of them.
__device__ float block_sum(float x) {
  __shared__ float sums[MAX_WARPS];
  x = warp_sum(x);
  __syncthreads();
  if (threadIdx.x % WARP == 0) sums[threadIdx.x / WARP] = x;
  __syncthreads();
  float total = 0.0f;
  for (int i = 0; i < (int)blockDim.x / WARP; i++) total += sums[i];
  return total;
}

// Return the maximum over the threads of a block, whole warps, to each of them.
__device__ float block_max(float x) {
  __shared__ float maxima[MAX_WARPS];
  x = warp_max(x);
  __syncthreads();
  if (threadIdx.x % WARP == 0) maxima[threadIdx.x / WARP] = x;
  __syncthreads();
  for (int i = 0; i < (int)blockDim.x / WARP; i++) x = fmaxf(x, maxima[i]);
  return x;
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

// Return the value over the threads of a block, whole warps, to each. Call it once.
__device__ LogSumExp block_log_sum_exp(LogSumExp own) {
  __shared__ LogSumExp warps[MAX_WARPS];
  own = warp_log_sum_exp(own);
  if (threadIdx.x % WARP == 0) warps[threadIdx.x / WARP] = own;
  __syncthreads();
  float maximum = LOWEST, sum = 0.0f;
  int count = blockDim.x / WARP;
  for (int i = 0; i < count; i++) maximum = fmaxf(maximum, warps[i].maximum);
  for (int i = 0; i < count; i++) sum += warps[i].sum * expf(warps[i].maximum - maximum);
  return {maximum, sum};
}

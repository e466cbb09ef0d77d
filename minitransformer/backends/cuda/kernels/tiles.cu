// Products of small matrices in shared memory, for attention.
//
// A block computes C = A B^T with sums in float. There are two bodies of the same
// arithmetic: one in plain C++, and one for tensor cores, where TENSOR_CORES names
// their type (f16 or bf16). Python compares the second with the first before it is used
// on a device. The largest sizes of a product are constants, so that loops unroll and
// nothing is divided at run time.

constexpr int TILE_THREADS = 128;  // of a block that multiplies tiles

// Round up to the 16 columns that tensor cores take at a time.
__device__ int whole_steps(int width) { return (width + 15) / 16 * 16; }

// How many of the SIZE rows of a tile are computed where `count` exist.
template <int SIZE>
__device__ int rows_used(int count) {
  return min(SIZE, whole_steps(count));
}

// Two neighbours of a row, read or written at once.
template <typename T>
struct alignas(2 * sizeof(T)) Pair {
  T first, second;
};

// A matrix in shared memory: element (i, k) of itself or of its transpose. Rows begin
// LINE elements apart, which are whole vectors.
template <int LINE, bool TRANSPOSED>
struct Tile {
  const real* elements;

  __device__ const real* at(int i, int k) const {
    return elements + (TRANSPOSED ? k * LINE + i : i * LINE + k);
  }
};

#ifdef TENSOR_CORES

#define QUOTE(x) #x
#define MMA(type)                                            \
  "mma.sync.aligned.m16n8k16.row.col.f32." QUOTE(type) "." QUOTE(type) \
  ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#define LDMATRIX(kind) \
  "ldmatrix.sync.aligned.m8n8.x4" kind ".shared.b16 {%0, %1, %2, %3}, [%4];"

// c += a b^T in a warp: a is 16 x 16, b 8 x 16 and c 16 x 8. With g = lane / 4 and
// t = lane % 4 * 2, a lane holds of a: rows g and g + 8 of columns t and t + 1, then
// the same of columns t + 8 and t + 9; of b: row g of columns t and t + 1, then of
// columns t + 8 and t + 9; of c: columns t and t + 1 of row g, then of row g + 8.
__device__ void multiply_fragments(float* c, const u32 (&a)[4], u32 b_0, u32 b_1) {
#ifdef HOST_KERNELS
  host_mma<real>(c, a, b_0, b_1);
#else
  asm volatile(MMA(TENSOR_CORES)
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_0), "r"(b_1));
#endif
}

// Read the 16 x 16 elements from (i, k) on, as `multiply_fragments` wants its a, or for
// FOR_B two of its b: rows 0 to 7, then 8 to 15. Each lane gives the address of one of
// the rows of four matrices of 8 x 8.
template <bool FOR_B, int LINE, bool TRANSPOSED>
__device__ void load_fragments(u32 (&x)[4], Tile<LINE, TRANSPOSED> tile, int i, int k) {
  int lane = threadIdx.x % WARP, second = lane / 8 % 2 * 8, third = lane / 16 * 8;
  i += FOR_B ? third : second, k += FOR_B ? second : third;
  const real* row = TRANSPOSED ? tile.at(i, k + lane % 8) : tile.at(i + lane % 8, k);
#ifdef HOST_KERNELS
  host_ldmatrix(x, row, TRANSPOSED);
#else
  u32 address = __cvta_generic_to_shared(row);
  if (TRANSPOSED)
    asm volatile(LDMATRIX(".trans")
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address) : "memory");
  else
    asm volatile(LDMATRIX("")
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address) : "memory");
#endif
}

#endif

// A matrix of sums, which are spread over the registers of a block. For tensor cores,
// each warp has 16 rows and some groups of 16 columns of them.
template <int ROWS, int COLUMNS>
struct Sums {
#ifdef TENSOR_CORES
  static constexpr int WARPS_A_ROW = TILE_THREADS / WARP / (ROWS / 16);
  static constexpr int GROUPS = (COLUMNS / 16 + WARPS_A_ROW - 1) / WARPS_A_ROW;
  float sum[GROUPS][8] = {};  // two fragments of 8 columns for each group

  __device__ static int row() { return threadIdx.x / WARP / WARPS_A_ROW * 16; }

  __device__ static int column(int group) {
    return (threadIdx.x / WARP % WARPS_A_ROW * GROUPS + group) * 16;
  }

  // Add a b^T. Threads wait before and after where they need to. Of DEPTH columns of a
  // and b, `depth` are there; of the rows, `rows` of a and `columns` of b.
  // Shapes: a [ROWS, DEPTH], b [COLUMNS, DEPTH]; the sizes in use are multiples of 16
  template <int DEPTH, typename A, typename B>
  __device__ void add(A a, B b, int rows, int columns, int depth) {
    if (row() >= rows || column(0) >= columns) return;
#pragma unroll
    for (int k = 0; k < DEPTH; k += 16) {
      if (k >= depth) break;
      u32 left[4], right[4];
      load_fragments<false>(left, a, row(), k);
#pragma unroll
      for (int group = 0; group < GROUPS; group++) {
        load_fragments<true>(right, b, column(group), k);
        multiply_fragments(sum[group], left, right[0], right[1]);
        multiply_fragments(sum[group] + 4, left, right[2], right[3]);
      }
    }
  }

  // Call visit(row, column, x, y) for each pair of neighbours in the first `rows` rows.
  template <typename Visit>
  __device__ void each(int rows, Visit visit) {
    if (row() >= rows || column(0) >= COLUMNS) return;
    int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < GROUPS * 4; i++) {
      float* pair = sum[i / 4] + i % 4 * 2;
      visit(row() + g + i % 2 * 8, column(i / 4) + t + i % 4 / 2 * 8, pair[0], pair[1]);
    }
  }
#else
  static constexpr int PAIRS = (ROWS * COLUMNS / 2 + TILE_THREADS - 1) / TILE_THREADS;
  float sum[PAIRS][2] = {};

  template <int DEPTH, typename A, typename B>
  __device__ void add(A a, B b, int rows, int columns, int depth) {
    each(rows, [&](int row, int column, float& x, float& y) {
      if (column >= columns) return;
      for (int k = 0; k < depth; k++) {
        float left = (float)*a.at(row, k);
        x += left * (float)*b.at(column, k), y += left * (float)*b.at(column + 1, k);
      }
    });
  }

  template <typename Visit>
  __device__ void each(int rows, Visit visit) {
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
      int place = (i * TILE_THREADS + threadIdx.x) * 2, row = place / COLUMNS;
      if (row < rows) visit(row, place % COLUMNS, sum[i][0], sum[i][1]);
    }
  }
#endif

  // Write the first `rows` rows to shared memory, rows LINE elements apart.
  template <int LINE, typename T>
  __device__ void store(T* tile, int rows) {
    each(rows, [&](int row, int column, float x, float y) {
      *(Pair<T>*)(tile + row * LINE + column) = {(T)x, (T)y};
    });
  }
};

// Eight neighbours of a row in shared memory.
__device__ void load_8(float (&x)[8], const float* row) {
  for (int i = 0; i < 8; i += 4) {
    float4 four = *(const float4*)(row + i);
    x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
  }
}

__device__ void store_8(real* row, const float (&x)[8]) {
  for (int i = 0; i < 8; i += VECTOR) {
    Vector vector;
    for (int j = 0; j < VECTOR; j++) vector.element[j] = (real)x[i + j];
    *(Vector*)(row + i) = vector;
  }
}


// Copy a vector to shared memory, or zeros. Where there are tensor cores, the thread
// goes on meanwhile, until `wait_for_copies`, so that all copies are under way at once.
__device__ void copy_vector(real* to, const real* from, bool there) {
#if defined(TENSOR_CORES) && !defined(HOST_KERNELS)
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :: "r"((u32)__cvta_generic_to_shared(to)), "l"(from), "r"(there ? 16 : 0)
               : "memory");
#else
  *(uint4*)to = there ? *(const uint4*)from : uint4{};
#endif
}

__device__ void wait_for_copies() {
#if defined(TENSOR_CORES) && !defined(HOST_KERNELS)
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// Read the first `used` of `left` rows of a matrix, with zeros beyond its end and in
// the columns up to a multiple of 16. Numbers are copied as they are.
// Shapes: tile [S::SIZE, S::WIDTH], S::LINE apart; rows [left, width], `stride` apart
template <typename S>
__device__ void load_tile(real* tile, const real* rows, int stride, int used, int left,
                          int width) {
  constexpr int ACROSS = S::WIDTH / VECTOR, STEP = TILE_THREADS / ACROSS;
  int first = threadIdx.x / ACROSS, column = threadIdx.x % ACROSS * VECTOR;
  bool vectors = in_vectors(rows, stride, width);
  if (column >= whole_steps(width)) return;
#pragma unroll
  for (int row = first; row < first + S::SIZE; row += STEP) {
    if (row >= used) break;
    const real* from = rows + (row * stride + column);
    real* to = tile + (row * S::LINE + column);
    bool there = row < left && column < width;
    if (vectors) {
      copy_vector(to, from, there);
    } else {
      for (int j = 0; j < VECTOR; j++)
        to[j] = there && column + j < width ? from[j] : (real)0.0f;
    }
  }
}

// Write the rows of a tile to the first of the `left` rows of a matrix.
// Shapes: as in `load_tile`
template <typename S>
__device__ void store_tile(real* rows, int stride, const real* tile, int left,
                           int width) {
  constexpr int ACROSS = S::WIDTH / VECTOR, STEP = TILE_THREADS / ACROSS;
  int first = threadIdx.x / ACROSS, column = threadIdx.x % ACROSS * VECTOR;
  bool vectors = in_vectors(rows, stride, width);
  if (column >= width) return;
#pragma unroll
  for (int row = first; row < first + S::SIZE; row += STEP) {
    if (row >= left) break;
    real* to = rows + (row * stride + column);
    const real* from = tile + (row * S::LINE + column);
    if (vectors) {
      *(uint4*)to = *(const uint4*)from;
    } else {
      for (int j = 0; j < VECTOR && column + j < width; j++) to[j] = from[j];
    }
  }
}

// Products of small matrices in shared memory, for attention.
//
// A block computes C = A B, or adds it to C, with sums in float. There are two bodies of
// the same arithmetic: one in plain C++, and one for tensor cores, where TENSOR_CORES
// names their type (f16 or bf16). Python compares the second with the first before it
// is used on a device.

constexpr int TILE_THREADS = 128;  // of a block that multiplies tiles

// Round up to the 16 columns that tensor cores take at a time.
__device__ int whole_steps(int width) { return (width + 15) / 16 * 16; }

// A matrix in shared memory: element (i, k) of itself or of its transpose.
template <bool TRANSPOSED>
struct Tile {
  const real* elements;
  int line;  // from a row to the next

  __device__ real at(int i, int k) const {
    return TRANSPOSED ? elements[k * line + i] : elements[i * line + k];
  }
};

#ifdef TENSOR_CORES

#define QUOTE(x) #x
#define MMA(type)                                            \
  "mma.sync.aligned.m16n8k16.row.col.f32." QUOTE(type) "." QUOTE(type) \
  ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"

// c += a b in a warp: a is 16 x 16, b 16 x 8 and c 16 x 8. With g = lane / 4 and
// t = lane % 4 * 2, a lane holds of a: rows g and g + 8 of columns t and t + 1, then the
// same of columns t + 8 and t + 9; of b: column g of rows t and t + 1, then of rows
// t + 8 and t + 9; of c: columns t and t + 1 of row g, then of row g + 8.
__device__ void multiply_fragments(float (&c)[4], const u32 (&a)[4],
                                   const u32 (&b)[2]) {
#ifdef HOST_KERNELS
  host_mma<real>(c, a, b);
#else
  asm volatile(MMA(TENSOR_CORES)
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// Two numbers of 16 bits, the first in the lower half.
__device__ u32 packed(real low, real high) {
  unsigned short bits[2];
  bits[0] = *(unsigned short*)&low, bits[1] = *(unsigned short*)&high;
  return bits[0] | (u32)bits[1] << 16;
}

#endif

// c = a b, or c + a b with `adds`. All threads of the block take part, and wait before
// and after where they need to.
// Shapes: c [rows, columns], rows `line` apart; a [rows, depth], b [depth, columns].
// For tensor cores rows, columns and depth are multiples of 16.
template <bool A_TRANSPOSED, bool B_TRANSPOSED>
__device__ void multiply_tiles(float* c, int line, Tile<A_TRANSPOSED> a,
                               Tile<B_TRANSPOSED> b, int rows, int columns, int depth,
                               bool adds) {
#ifdef TENSOR_CORES
  int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4 * 2;
  int across = columns / 8, count = rows / 16 * across;
  for (int i = threadIdx.x / WARP; i < count; i += TILE_THREADS / WARP) {
    int row = i / across * 16 + g, column = i % across * 8;
    float* upper = c + row * line + column + t;
    float* lower = upper + 8 * line;
    float sum[4] = {};
    if (adds) sum[0] = upper[0], sum[1] = upper[1], sum[2] = lower[0], sum[3] = lower[1];
    for (int k = t; k < depth; k += 16) {
      u32 left[4], right[2];
      for (int j = 0; j < 4; j++) {
        int r = row + j % 2 * 8, s = k + j / 2 * 8;
        left[j] = packed(a.at(r, s), a.at(r, s + 1));
      }
      for (int j = 0; j < 2; j++) {
        int s = k + j * 8;
        right[j] = packed(b.at(s, column + g), b.at(s + 1, column + g));
      }
      multiply_fragments(sum, left, right);
    }
    upper[0] = sum[0], upper[1] = sum[1], lower[0] = sum[2], lower[1] = sum[3];
  }
#else
  for (int i = threadIdx.x; i < rows * columns; i += TILE_THREADS) {
    int row = i / columns, column = i % columns;
    float sum = adds ? c[row * line + column] : 0.0f;
    for (int k = 0; k < depth; k++)
      sum += (float)a.at(row, k) * (float)b.at(k, column);
    c[row * line + column] = sum;
  }
#endif
}

// Read `ROWS` rows of a matrix from row `first` on, with zeros beyond its end and in the
// columns up to `padded`.
// Shapes: tile [ROWS, line], rows [count, width], `stride` elements apart
template <int ROWS>
__device__ void load_tile(real* tile, int line, const real* rows, i64 stride, int first,
                          int count, int width, int padded) {
  int across = padded / VECTOR;
  for (int i = threadIdx.x; i < ROWS * across; i += TILE_THREADS) {
    int row = i / across, column = i % across * VECTOR;
    float value[VECTOR] = {};
    if (first + row < count && column < width)
      load(value, rows + (first + row) * stride, column, width);
    store(tile + row * line, column, padded, value);
  }
}

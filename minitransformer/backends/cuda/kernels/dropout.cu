// Dropout.

// Philox 4x32-10 (Salmon et al., 2011): 128 random bits from a seed and a counter.
__device__ uint4 philox(u64 seed, u64 counter) {
  u32 a = (u32)counter, b = (u32)(counter >> 32), c = 0, d = 0;
  u32 key_0 = (u32)seed, key_1 = (u32)(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; round++) {
    u64 p = (u64)0xD2511F53u * a, q = (u64)0xCD9E8D57u * c;
    a = (u32)(q >> 32) ^ b ^ key_0;
    b = (u32)q;
    c = (u32)(p >> 32) ^ d ^ key_1;
    d = (u32)p;
    key_0 += 0x9E3779B9u;
    key_1 += 0xBB67AE85u;
  }
  return {a, b, c, d};
}

// A dropout mask, which is never stored: each kernel computes its numbers again. Element
// (row, column) is kept if its random 16-bit number is at least `threshold`, and then
// scaled by 1 / (1 - rate), where rate = threshold / 65536. Each counter gives 8 numbers,
// and each row starts with a new counter, row 0 with `first`. Threshold 0 means no
// dropout.
struct Dropout {
  const u64* seed;
  u64 first;
  int threshold, width;

  // Begin `rows` rows later.
  __device__ void skip(i64 rows) { first += rows * ((width + 7) / 8); }

  // Shapes: value [COUNT], 4 or 8 elements from `column` on, a multiple of COUNT
  template <int COUNT>
  __device__ void apply(float (&value)[COUNT], i64 row, int column) const {
    if (threshold == 0) return;
    u64 counter = first + row * ((width + 7) / 8) + column / 8;
    uint4 random = philox(*seed, counter);
    float factor = __fdividef(65536.0f, 65536 - threshold);
    for (int i = 0; i < COUNT; i++) {
      int number = column % 8 + i;
      u32 word = number < 2 ? random.x : number < 4 ? random.y
               : number < 6 ? random.z : random.w;
      bool keep = (int)(word >> 16 * (i % 2) & 65535) >= threshold;
      value[i] = keep ? value[i] * factor : 0.0f;
    }
  }
};

// out = Dropout(x): x / (1 - rate) where the mask keeps it, else 0. One warp for each row.
// Shapes: out, x [rows, width]
extern "C" __global__ void dropout(real* out, const real* x, i64 rows, int width,
                                   const u64* seed, u64 first, int threshold) {
  i64 row = warp_row();
  if (row >= rows) return;
  for (int column = lane_column(); column < width; column += WARP * VECTOR) {
    float value[VECTOR];
    load(value, x + row * width, column, width);
    Dropout{seed, first, threshold, width}.apply(value, row, column);
    store(out + row * width, column, width, value);
  }
}

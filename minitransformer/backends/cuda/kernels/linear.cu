// Linear layers.

// out = out + bias, or max(0, out + bias) with `relu`, in place; without a bias where
// that is null. One warp for each row.
// Shapes: out [rows, width], bias [width]
extern "C" __global__ void bias_relu(real* out, const float* bias, i64 rows, int width,
                                     int relu) {
  i64 row = warp_row();
  if (row >= rows) return;
  out += row * width;
  for (int column = lane_column(); column < width; column += WARP * VECTOR) {
    float value[VECTOR], term[VECTOR] = {};
    load(value, out, column, width);
    if (bias != nullptr) load_floats(term, bias, column, width);
    for (int i = 0; i < VECTOR; i++) {
      value[i] += term[i];
      if (relu && value[i] < 0.0f) value[i] = 0.0f;
    }
    store(out, column, width, value);
  }
}

// masked = g where out > 0, else 0; partial = sums of the columns of `masked`, the
// first stage of the bias's gradient.
// Shapes: masked, g, out [rows, width], partial [gridDim.y, width]
extern "C" __global__ void relu_backward(float* partial, const real* g, const real* out,
                                         real* masked, i64 rows, int width) {
  sum_columns(partial, rows, width, [&](float (&x)[VECTOR], i64 row, int column) {
    float activated[VECTOR];
    load(x, g + row * width, column, width);
    load(activated, out + row * width, column, width);
    for (int i = 0; i < VECTOR; i++) x[i] = activated[i] > 0.0f ? x[i] : 0.0f;
    store(masked + row * width, column, width, x);
  });
}

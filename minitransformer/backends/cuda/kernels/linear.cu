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

// masked = g where out > 0, else 0. One thread for each vector.
// Shapes: masked, g, out [count]
extern "C" __global__ void relu_backward(real* masked, const real* g, const real* out,
                                         i64 count) {
  i64 start = thread_index() * VECTOR;
  if (start >= count) return;
  int width = count - start < VECTOR ? count - start : VECTOR;
  float value[VECTOR], activated[VECTOR];
  load(value, g + start, 0, width);
  load(activated, out + start, 0, width);
  for (int i = 0; i < VECTOR; i++) value[i] = activated[i] > 0.0f ? value[i] : 0.0f;
  store(masked + start, 0, width, value);
}

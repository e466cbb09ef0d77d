// The update (section 5.3).

// partial[block] = the sum of squares of that block's share of the gradient. One block
// for each partial sum.
// Shapes: gradient [count], partial [gridDim.x]
extern "C" __global__ void square_sums(float* partial, const float* gradient,
                                       i64 count) {
  float sum = 0.0f;
  for (i64 i = thread_index(); i < count; i += (i64)gridDim.x * blockDim.x)
    sum += gradient[i] * gradient[i];
  sum = block_sum(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// What the host knows of an update.
struct AdamNumbers {
  float rate, beta1, beta2, epsilon;
  float clip_norm;  // 0 for no clipping
};

// With g = gradient / loss_scale, clipped to the norm `clip_norm`, and t = steps:
// first_moment = beta1 first_moment + (1 - beta1) g,
// second_moment = beta2 second_moment + (1 - beta2) g^2,
// parameters -= rate (first_moment / (1 - beta1^t)) /
//               (sqrt(second_moment / (1 - beta2^t)) + epsilon),
// and low_precision = the parameters as `real`, unless it is null. Nothing changes if
// `squares`, the sum of squares of the gradient, is not finite. One thread for each
// four parameters, whose vectors begin at whole ones.
// Shapes: steps, loss_scale, squares [1], all other arrays [count]
extern "C" __global__ void adam(
    float* parameters, const float* gradient, float* first_moment, float* second_moment,
    real* low_precision, AdamNumbers numbers, const i64* steps, const float* loss_scale,
    const float* squares, i64 count) {
  i64 start = thread_index() * 4;
  if (start >= count || !isfinite(*squares)) return;
  float norm = sqrtf(*squares) / *loss_scale;
  bool clips = numbers.clip_norm > 0.0f && norm > numbers.clip_norm;
  float scale = (clips ? numbers.clip_norm / norm : 1.0f) / *loss_scale;
  float correction_1 = 1.0f - powf(numbers.beta1, (float)*steps);
  float correction_2 = 1.0f - powf(numbers.beta2, (float)*steps);
  float rate = numbers.rate / correction_1, inverse_2 = 1.0f / correction_2;

  auto update = [&](float& p, float g, float& m, float& v) {
    g *= scale;
    m = numbers.beta1 * m + (1.0f - numbers.beta1) * g;
    v = numbers.beta2 * v + (1.0f - numbers.beta2) * g * g;
    p -= rate * m / (sqrtf(v * inverse_2) + numbers.epsilon);
  };
  if (start + 4 > count) {
    for (i64 i = start; i < count; i++) {
      update(parameters[i], gradient[i], first_moment[i], second_moment[i]);
      if (low_precision != nullptr) low_precision[i] = (real)parameters[i];
    }
    return;
  }
  auto four = [&](auto* array) { return (float4*)(array + start); };
  float4 p = *four(parameters), m = *four(first_moment), v = *four(second_moment);
  const float4 g = *(const float4*)(gradient + start);
  update(p.x, g.x, m.x, v.x);
  update(p.y, g.y, m.y, v.y);
  update(p.z, g.z, m.z, v.z);
  update(p.w, g.w, m.w, v.w);
  *four(parameters) = p;
  *four(first_moment) = m;
  *four(second_moment) = v;
  if (low_precision == nullptr) return;
  struct alignas(4 * sizeof(real)) Four {
    real element[4];
  };
  *(Four*)(low_precision + start) = {{(real)p.x, (real)p.y, (real)p.z, (real)p.w}};
}

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

// The numbers that the host sets before each update.
struct AdamScalars {
  float rate, beta1, beta2, epsilon;
  float correction1, correction2;  // 1 - beta1^t, 1 - beta2^t
  float scale;                     // of the gradient: 1 / loss scale
  float clip_norm;                 // 0 for no clipping
};

// With g = gradient * scale, clipped to the norm `clip_norm`:
// first_moment = beta1 first_moment + (1 - beta1) g,
// second_moment = beta2 second_moment + (1 - beta2) g^2,
// parameters -= rate (first_moment / correction1) /
//               (sqrt(second_moment / correction2) + epsilon),
// and low_precision = the parameters as `real`, unless it is null. Nothing changes if
// `squares`, the sum of squares of the gradient, is not finite. One thread for each
// parameter.
// Shapes: squares [1], all other arrays [count]
extern "C" __global__ void adam(
    float* parameters, const float* gradient, float* first_moment, float* second_moment,
    real* low_precision, const AdamScalars* scalars, const float* squares, i64 count) {
  i64 i = thread_index();
  if (i >= count || !isfinite(*squares)) return;
  AdamScalars s = *scalars;
  float norm = sqrtf(*squares) * s.scale;
  bool clips = s.clip_norm > 0.0f && norm > s.clip_norm;
  float g = gradient[i] * s.scale * (clips ? s.clip_norm / norm : 1.0f);
  float m = first_moment[i] = s.beta1 * first_moment[i] + (1.0f - s.beta1) * g;
  float v = second_moment[i] = s.beta2 * second_moment[i] + (1.0f - s.beta2) * g * g;
  float root = sqrtf(v / s.correction2) + s.epsilon;
  float parameter = parameters[i] -= s.rate / s.correction1 * m / root;
  if (low_precision != nullptr) low_precision[i] = (real)parameter;
}

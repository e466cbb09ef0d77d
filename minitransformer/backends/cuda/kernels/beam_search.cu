// Beam search (section 6.1).

// A candidate, whose index names a token or a beam and a token.
template <typename Value>
struct Candidate {
  Value value;
  int index;

  // The better candidate comes first: the higher value, the lower index among equals.
  __device__ bool before(Candidate other) const {
    return value > other.value || (value == other.value && index < other.index);
  }
};

template <typename Value>
__device__ Candidate<Value> warp_best(Candidate<Value> own) {
#pragma unroll
  for (int step = WARP / 2; step > 0; step /= 2) {
    Candidate<Value> other{__shfl_xor_sync(0xffffffff, own.value, step),
                           __shfl_xor_sync(0xffffffff, own.index, step)};
    if (other.before(own)) own = other;
  }
  return own;
}

// The most candidates for the best tokens of a row that a block keeps.
constexpr int MAX_CANDIDATES = 1024;

// The best `count` tokens of each row of logits, best first, with their logits as
// values; log_totals = log(sum(exp(logits))) over all tokens. Tokens below `first` are
// never among the best; where too few others are left, a value is -infinity. One block
// for each row. Its first pass finds the best token of each thread; the count-th best
// of these bounds what can be among the best, and a second pass, which finds the row in
// the cache, keeps what reaches it.
// If that is too much to keep, each of the best takes a pass of its own.
// Shapes: values, tokens [N, count], log_totals [N], logits [N, V]; V = width
extern "C" __global__ void top_tokens(float* values, int* tokens, float* log_totals,
                                      const real* logits, int count, int first,
                                      int width) {
  __shared__ Candidate<float> warps[WARPS], list[MAX_CANDIDATES];
  __shared__ int length;
  i64 row = blockIdx.x;
  logits += row * width;
  values += row * count, tokens += row * count;
  LogSumExp total{LOWEST, 0.0f};
  Candidate<float> none{-INFINITY, 0x7fffffff}, own = none, last{INFINITY, -1};
  for (int i = threadIdx.x; i < width; i += blockDim.x) {
    Candidate<float> here{(float)logits[i], i};
    total.add(here.value);
    if (i >= first && here.before(own)) own = here;
  }
  total = block_log_sum_exp(total);
  auto best_of_block = [&](Candidate<float> best) {
    best = warp_best(best);
    if (threadIdx.x % WARP == 0) warps[threadIdx.x / WARP] = best;
    __syncthreads();
    for (int i = 0; i < WARPS; i++)
      if (warps[i].before(best)) best = warps[i];
    __syncthreads();
    return best;
  };
  Candidate<float> bound = last;
  for (int k = 0; k < count; k++)
    bound = best_of_block(bound.before(own) ? own : none);
  if (threadIdx.x == 0) length = 0;
  __syncthreads();
  for (int i = first + threadIdx.x; i < width; i += blockDim.x) {
    Candidate<float> here{(float)logits[i], i};
    if (bound.before(here)) continue;
    int place = atomicAdd(&length, 1);
    if (place < MAX_CANDIDATES) list[place] = here;
  }
  __syncthreads();
  bool listed = length <= MAX_CANDIDATES;
  for (int k = 0; k < count; k++) {
    Candidate<float> best = none;
    int end = listed ? length : width;
    for (int i = threadIdx.x + (listed ? 0 : first); i < end; i += blockDim.x) {
      Candidate<float> here = none;
      if (listed) here = list[i];
      else here.value = (float)logits[i], here.index = i;
      if (last.before(here) && here.before(best)) best = here;
    }
    last = best = best_of_block(best);
    if (threadIdx.x == 0) values[k] = best.value, tokens[k] = best.index;
  }
  if (threadIdx.x == 0) log_totals[row] = total.value();
}

// The hypotheses that have ended: the `nbest` best of each sentence, best first. Step
// and beam say where the last token before EOS was chosen. `counts` counts all that
// have ended, also those that are not among the best.
// Shapes: scores, log_probs, steps, beams [B, nbest], counts [B]
struct FinishedHypotheses {
  double* scores;
  double* log_probs;
  int* steps;
  int* beams;
  int* counts;
  int nbest;

  __device__ void set(i64 i, double score, double log_prob, int step, int beam) {
    scores[i] = score, log_probs[i] = log_prob, steps[i] = step, beams[i] = beam;
  }

  // Insert a hypothesis behind those of at least its score.
  __device__ void add(int sentence, double score, double log_prob, int step, int beam) {
    int held = counts[sentence]++, rank = held < nbest ? held : nbest;
    i64 start = (i64)sentence * nbest;
    for (; rank > 0 && scores[start + rank - 1] < score; rank--) {
      i64 i = start + rank - 1;
      if (rank < nbest) set(i + 1, scores[i], log_probs[i], steps[i], beams[i]);
    }
    if (rank < nbest) set(start + rank, score, log_prob, step, beam);
  }
};

// cache[row, position] = latest[row]. One thread for each element.
// Shapes: cache [B K, capacity, width], latest [B K, width], position [1];
// count = B K width
extern "C" __global__ void append_to_cache(real* cache, const real* latest,
                                           const int* position, int count, int capacity,
                                           int width) {
  i64 i = thread_index();
  if (i >= count) return;
  i64 row = i / width, column = i % width;
  cache[(row * capacity + *position) * width + column] = latest[i];
}

// One step of the search that translation/beam_search.py describes. The candidates of
// a sentence are the `count` best tokens of each of its beams. The best `count`
// candidates are taken in turn: one that ends in EOS is a finished hypothesis if it is
// among the best K, and the best K of the others are the next beams. A sentence is done
// when no further step can improve its hypotheses; the beams of one that was done
// before get log-probability -infinity. One warp for each sentence, in blocks of 32.
//
// Parameters, for the B' sentences still in the batch, with `beams` beams each (1 in
// the first step, then K):
// - the next beams [B', K]: log-probabilities `next`, the beam of its sentence that
//   each continues (`origins`), the same as a row of all beams (`rows`), and the token
//   `chosen`; then done [B'];
// - the finished hypotheses of all B sentences, as in FinishedHypotheses;
// - the candidates: log_probs [B', beams] of the beams, and values, tokens
//   [B', beams, count] and log_totals [B', beams] as `top_tokens` returns them;
// - `sentences` [B'], the indices of the sentences in the whole batch; the step limits
//   of all sentences [B], and the length penalties of all lengths;
// - `beams`, K, `count`, the number of this step (from 1) and the id of EOS.
// A sentence with a logit that is not finite is done and has no hypothesis.
extern "C" __global__ void beam_search_step(
    double* next, int* origins, int* rows, int* chosen, bool* done, double* end_scores,
    double* end_log_probs, int* end_steps, int* end_beams, int* end_counts, int nbest,
    const double* log_probs, const float* values, const int* tokens,
    const float* log_totals, const int* sentences, const int* limits,
    const double* penalties, int beams, int beam_size, int count, int step, int eos) {
  int b = blockIdx.x, lane = threadIdx.x, sentence = sentences[b], live = 0;
  FinishedHypotheses finished{end_scores, end_log_probs, end_steps, end_beams,
                              end_counts, nbest};
  next += b * beam_size, origins += b * beam_size;
  rows += b * beam_size, chosen += b * beam_size;
  values += b * beams * count, tokens += b * beams * count;
  log_probs += b * beams, log_totals += b * beams;
  Candidate<double> last{INFINITY, -1};
  for (int k = 0; k < count && !done[b]; k++) {
    Candidate<double> best{-INFINITY, 0x7fffffff};
    for (int i = lane; i < beams * count; i += WARP) {
      Candidate<double> here{values[i] + (log_probs[i / count] - log_totals[i / count]),
                             i};
      if (last.before(here) && here.before(best)) best = here;
    }
    last = best = warp_best(best);
    if (lane > 0 || best.value == -INFINITY) continue;
    int token = tokens[best.index], beam = best.index / count;
    if (token != eos && live < beam_size) {
      next[live] = best.value, origins[live] = beam, chosen[live] = token;
      live++;
    } else if (token == eos && k < beam_size) {
      finished.add(sentence, best.value / penalties[step], best.value, step - 1, beam);
    }
  }
  if (lane > 0) return;
  for (int k = live; k < beam_size; k++)
    next[k] = -INFINITY, origins[k] = chosen[k] = 0;
  for (int k = 0; k < beam_size; k++) rows[k] = b * beams + origins[k];
  if (done[b]) return;
  for (int k = 0; k < beams; k++) {
    if (isfinite(log_totals[k])) continue;  // all are, unless the training diverged
    end_counts[sentence] = 0, done[b] = true;
    return;
  }
  bool at_limit = step == limits[sentence], none = end_counts[sentence] == 0;
  for (int k = 0; at_limit && none && k < live; k++)
    finished.add(sentence, next[k] / penalties[step], next[k], step, k);
  // Log-probabilities only fall, so this bounds the score that a live beam can reach.
  double reachable = next[0] / penalties[limits[sentence]];
  int held = end_counts[sentence];
  double to_beat = held >= nbest ? end_scores[sentence * nbest + nbest - 1] : -INFINITY;
  done[b] = at_limit || held >= beam_size || to_beat >= reachable ||
            next[0] == -INFINITY;
}

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

// cache[row, *position] = the row's key, and behind it its value. One thread for each
// element.
// Shapes: cache [rows, capacity, width], keys [rows, key_width], values [rows,
// value_width], position [1]
extern "C" __global__ void append_to_cache(real* cache, const real* keys,
                                           const real* values, const int* position,
                                           int rows, int capacity, int width,
                                           int key_width, int value_width) {
  int both = key_width + value_width;
  i64 i = thread_index();
  if (i >= (i64)rows * both) return;
  i64 row = i / both;
  int column = i % both, beyond = column - key_width;
  cache[(row * capacity + *position) * width + column] =
      beyond < 0 ? keys[row * key_width + column] : values[row * value_width + beyond];
}

// The first *position entries of a beam's cache become those of the beam origins[b, k]
// of its sentence, in place and in all layers. One thread for each vector of each beam,
// in blocks that hold a vector of all beams: they are read before one is written. Block
// (x, b, layer) has blockDim.x vectors of sentence b.
// Shapes: cache [layers, B, K, capacity, width], of which a layer is `layer_size` long;
// origins [B', K], position [1]
extern "C" __global__ void select_beams(real* cache, const int* origins,
                                        const int* position, i64 layer_size,
                                        int capacity, int width) {
  int beams = blockDim.y, k = threadIdx.y, vectors = width / VECTOR;
  int vector = blockIdx.x * blockDim.x + threadIdx.x;
  bool there = vector < *position * vectors;
  cache += blockIdx.z * layer_size;
  i64 sentence = (i64)blockIdx.y * beams, beam_size = (i64)capacity * vectors;
  int origin = origins[sentence + k];
  uint4* all = (uint4*)cache;
  uint4 moved;
  if (there) moved = all[(sentence + origin) * beam_size + vector];
  __syncthreads();
  if (there && origin != k) all[(sentence + k) * beam_size + vector] = moved;
}

// What a search keeps from step to step: of the B' sentences that are left, and of all
// B. The last token before EOS of a hypothesis that has ended was chosen at step
// end_steps for beam end_beams; counts are those of FinishedHypotheses.
struct Search {
  double* log_probs;      // of the beams [B', K]
  double* next;           // the same after this step, until it ends
  int* tokens;            // the newest of each beam [B', K]
  int* origins;           // the beam of its sentence that each continues [B', K]
  bool* done;             // [B']
  const int* sentences;   // of these rows [B'], among all
  const int* limits;      // the last step of each sentence [B]
  const double* penalties;  // of all lengths [capacity + 1]
  double* end_scores;     // of finished hypotheses, best first [B, nbest]
  double* end_log_probs;  // [B, nbest]
  int* end_steps;         // [B, nbest]
  int* end_beams;         // [B, nbest]
  int* end_counts;        // [B]
  int* all_origins;       // of each step [capacity, B, K]
  int* all_tokens;        // [capacity, B, K]
  int* position;          // the tokens of each beam so far [1]
  int all_sentences, nbest, beams, eos;
};

// One step of the search that translation/beam_search.py describes. The candidates of
// a sentence are the 2 K best tokens of each of its beams. The best 2 K candidates are
// taken in turn: one that ends in EOS is a finished hypothesis if it is among the best
// K, and the best K of the others are the next beams. A sentence is done when no
// further step can improve its hypotheses, or when a logit is not finite: then it has
// no hypothesis. In the first step only the first beam has a log-probability above
// -infinity. One warp for each sentence, in blocks of 32.
// Shapes: values, tokens [B', K, 2 K] and log_totals [B', K] as `top_tokens` returns
// them
extern "C" __global__ void beam_search_step(Search search, const float* values,
                                            const int* tokens,
                                            const float* log_totals) {
  int b = blockIdx.x, lane = threadIdx.x, beams = search.beams, count = 2 * beams;
  if (search.done[b]) return;
  int sentence = search.sentences[b], step = *search.position + 1, live = 0;
  FinishedHypotheses finished{search.end_scores, search.end_log_probs, search.end_steps,
                              search.end_beams, search.end_counts, search.nbest};
  double *log_probs = search.log_probs + b * beams, *next = search.next + b * beams;
  int *origins = search.origins + b * beams, *chosen = search.tokens + b * beams;
  values += b * beams * count, tokens += b * beams * count, log_totals += b * beams;
  Candidate<double> last{INFINITY, -1};
  for (int k = 0; k < count; k++) {
    Candidate<double> best{-INFINITY, 0x7fffffff};
    for (int i = lane; i < beams * count; i += WARP) {
      Candidate<double> here{values[i] + (log_probs[i / count] - log_totals[i / count]),
                             i};
      if (last.before(here) && here.before(best)) best = here;
    }
    last = best = warp_best(best);
    if (lane > 0 || best.value == -INFINITY) continue;
    int token = tokens[best.index], beam = best.index / count;
    if (token != search.eos && live < beams) {
      next[live] = best.value, origins[live] = beam, chosen[live] = token;
      live++;
    } else if (token == search.eos && k < beams) {
      finished.add(sentence, best.value / search.penalties[step], best.value, step - 1,
                   beam);
    }
  }
  if (lane > 0) return;  // from here on the first lane alone reads what it has written
  for (int k = live; k < beams; k++) next[k] = -INFINITY, origins[k] = chosen[k] = 0;
  bool finite = true;
  for (int k = 0; k < beams; k++) finite = finite && isfinite(log_totals[k]);
  if (!finite) {  // as in a training that diverged
    search.end_counts[sentence] = 0, search.done[b] = true;
    return;
  }
  i64 history = ((i64)(step - 1) * search.all_sentences + sentence) * beams;
  for (int k = 0; k < beams; k++) {
    log_probs[k] = next[k];
    search.all_origins[history + k] = origins[k];
    search.all_tokens[history + k] = chosen[k];
  }
  int limit = search.limits[sentence];
  bool at_limit = step == limit, none = search.end_counts[sentence] == 0;
  for (int k = 0; at_limit && none && k < live; k++)
    finished.add(sentence, next[k] / search.penalties[step], next[k], step, k);
  // Log-probabilities only fall, so this bounds the score that a live beam can reach.
  double reachable = next[0] / search.penalties[limit];
  int held = search.end_counts[sentence], nbest = search.nbest;
  double to_beat =
      held >= nbest ? search.end_scores[sentence * nbest + nbest - 1] : -INFINITY;
  search.done[b] = at_limit || held >= beams || to_beat >= reachable ||
                   next[0] == -INFINITY;
}

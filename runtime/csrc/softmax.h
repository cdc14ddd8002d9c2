// Online softmax: a stretch of scores becomes probabilities against the largest score so far, and what was summed
// before is rescaled to it.
#pragma once

#include "values.h"

namespace specache {

// What the model does to a product: softcap, then bias. `pair` is the stored token's number, or that of an own pair.
inline float finished(const Head& h, int64_t q, int64_t pair, float score) {
  if (h.in.softcap != 0) score = capped(splat(score), h.in.softcap)[0];
  return h.in.bias == nullptr ? score : score + h.bias_of(q)[pair];
}

// The same for the n scores of a chunk.
inline void finish_scores(const Head& h, int64_t q, int64_t first, int64_t n) {
  float* scores = h.probs_of(q);
  if (h.in.softcap != 0)
    for (int64_t t = 0; t < n; t += kLanes) store(scores + t, capped(load_floats(scores + t), h.in.softcap));
  if (h.in.bias == nullptr) return;
  const float* bias = h.bias_of(q) + first;
  for (int64_t t = 0; t < n; t++) scores[t] += bias[t];
}

// Scores of stored tokens that a lane does not see, or that staged pairs replace, become -inf.
inline void hide(const Head& h, int64_t first, int64_t n) {
  const SpecacheInputs& in = h.in;
  const int32_t* staged = h.staged();
  for (int64_t i = 0; i < in.num_staged; i++)
    if (staged[i] >= first && staged[i] < first + n)
      for (int64_t q = 0; q < h.s.queries; q++) h.probs_of(q)[staged[i] - first] = -kInfinity;
  if (in.key_mask == nullptr && in.visible == nullptr) return;
  for (int64_t q = 0; q < h.s.queries; q++)
    for (int64_t t = 0; t < n; t++)
      if (!h.sees(q / in.heads_per_kv, first + t)) h.probs_of(q)[t] = -kInfinity;
}

// Takes over a new maximum: what was summed so far shrinks. Returns what scores are to be measured against.
inline float raise_maximum(const Head& h, int64_t q, float maximum) {
  const Sizes& s = h.s;
  float& known = h.result->maximum[q];
  if (maximum > known) {
    const float shrink = known == -kInfinity ? 0.0f : exponential(known - maximum);
    known = maximum;
    h.result->mass[q] *= shrink;
    float* out = h.result->out + q * s.value_pad;
    for (int64_t c = 0; c < s.value_pad; c++) out[c] *= shrink;
    if (h.rotated_out != nullptr)
      for (int64_t c = 0; c < s.value_pad; c++) h.rotated_out[q * s.value_pad + c] *= shrink;
    float* packed = h.packed_out + q * s.value_groups * s.columns;
    for (int64_t n = 0; n < s.value_groups * s.columns; n++) packed[n] *= shrink;
    float* constants = h.constants + q * s.value_groups * kLanes;
    for (int64_t i = 0; i < s.value_groups * kLanes; i++) constants[i] *= shrink;
  }
  return known == -kInfinity ? 0.0f : known;
}

// n is a multiple of kLanes.
inline float largest_of(const float* x, int64_t n) {
  Floats top = splat(-kInfinity);
  for (int64_t t = 0; t < n; t += kLanes) top = larger(load_floats(x + t), top);
  return largest(top);
}

inline float sum_of(const float* x, int64_t n) {
  Floats all{};
  for (int64_t t = 0; t < n; t += kLanes) all += load_floats(x + t);
  return sum(all);
}

// scores[0..n) of query q become probabilities, n a multiple of kLanes, and `all` their sum. Returns the largest.
inline float to_probs(const Head& h, int64_t q, float* scores, int64_t n, float* reference, float* all) {
  const float maximum = largest_of(scores, n);
  *reference = raise_maximum(h, q, maximum);
  Floats mass{};
  for (int64_t t = 0; t < n; t += kLanes) {
    const Floats p = exponential(load_floats(scores + t) - *reference);
    store(scores + t, p);
    mass += p;
  }
  *all = sum(mass);
  h.result->mass[q] += *all;
  return exponential(maximum - *reference);
}

// A pair with a larger share of a query's attention is read in float arithmetic: there the rounding of factors would matter
// most.
constexpr float kLarge = 1.0f / 64;

// Such pairs, by the mass so far, are read again. They leave `probs` for `h.large`. Returns how many.
template <int BITS>
inline int64_t recompute_large(const Head& h, int64_t q, int64_t first, int64_t n, float* probs, float reference,
                               int64_t count) {
  float& mass = h.result->mass[q];
  const float bound = mass * kLarge;
  for (int64_t t = 0; t < n; t++) {
    // Most blocks have none.
    if (t % (4 * kLanes) == 0 && !(largest_of(probs + t, 4 * kLanes) > bound)) {
      t += 4 * kLanes - 1;
      continue;
    }
    if (!(probs[t] > bound) || count == 64 * h.s.queries) continue;
    read_key<BITS>(h, first + t);
    const float score = finished(h, q, first + t, score_row(h, q));
    const float p = exponential(score - reference);
    mass += p - probs[t];
    add_value<BITS>(h, first + t, q, p);
    h.large[count++] = {q, t, p};
    probs[t] = 0.0f;
  }
  return count;
}

// Scores of a chunk of low-bit pairs, `first` and `n` whole groups, become probabilities.
template <int BITS>
inline void score_stored(Head& h, int64_t first, int64_t n) {
  const int64_t chunk = first / h.s.chunk, padded = round_up(n, 4 * kLanes);
  h.open(chunk);
  score_chunk<BITS>(h, first, n);
  for (int64_t q = 0; q < h.s.queries; q++) finish_scores(h, q, first, n);
  hide(h, first, n);
  for (int64_t q = 0; q < h.s.queries; q++) {
    float* row = h.probs_of(q);
    for (int64_t t = n; t < padded; t++) row[t] = -kInfinity;
    const int64_t i = chunk * h.s.queries + q;
    h.tops[q] = to_probs(h, q, row, padded, h.probs->reference + i, h.probs->sums + i);
  }
}

// Its values, weighted by `probs_of`.
template <int BITS>
inline void add_stored(const Head& h, int64_t first, int64_t n) {
  if (h.in.centred) add_means(h, first, n);
  if (h.in.tolerance > 0)
    add_values<BITS, 1>(h, first, n);
  else
    add_values<BITS, 2>(h, first, n);
}

// Both in turn.
template <int BITS>
inline void add_chunk(Head& h, int64_t first, int64_t n) {
  const int64_t chunk = first / h.s.chunk, padded = round_up(n, 4 * kLanes);
  score_stored<BITS>(h, first, n);
  int64_t num_large = 0;
  for (int64_t q = 0; q < h.s.queries; q++) {
    if (!(h.tops[q] > h.result->mass[q] * kLarge)) continue;
    float* row = h.probs_of(q);
    num_large = recompute_large<BITS>(h, q, first, n, row, h.probs->reference[chunk * h.s.queries + q], num_large);
    h.tops[q] = largest_of(row, padded);
  }
  add_stored<BITS>(h, first, n);
  for (int64_t i = 0; i < num_large; i++) h.probs_of(h.large[i].query)[h.large[i].token] = h.large[i].prob;
}

}  // namespace specache

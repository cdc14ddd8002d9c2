// When all of a head has been read: its output, and its probabilities as selection scores.
#pragma once

#include "exact.h"

namespace specache {

// Adds the parts of a head up into the first one.
inline void merge(Result* parts, int64_t num_parts, const Sizes& s) {
  for (int64_t q = 0; q < s.queries; q++) {
    float maximum = -kInfinity;
    for (int64_t i = 0; i < num_parts; i++)
      maximum = parts[i].maximum[q] > maximum ? parts[i].maximum[q] : maximum;
    float mass = 0;
    float* out = parts[0].out + q * s.value_pad;
    for (int64_t i = 0; i < num_parts; i++) {
      const float part = parts[i].maximum[q] == -kInfinity ? 0.0f : exponential(parts[i].maximum[q] - maximum);
      mass += parts[i].mass[q] * part;
      const float* from = parts[i].out + q * s.value_pad;
      for (int64_t c = 0; c < s.value_pad; c++) out[c] = (i > 0 ? out[c] : 0.0f) + from[c] * part;
    }
    parts[0].maximum[q] = maximum;
    parts[0].mass[q] = mass;
  }
}

inline void write_out(const Head& h) {
  for (int64_t q = 0; q < h.s.queries; q++) {
    const float mass = h.result->mass[q], share = mass == 0 ? 0.0f : 1.0f / mass;  // all hidden: 0, as SDPA
    const float* from = h.result->out + q * h.s.value_pad;
    const int64_t row = h.query_row(q) * h.in.value_dim;
    for (int64_t c = 0; c < h.in.value_dim; c++) from_float(h.in.out, row + c, from[c] * share, h.in.dtype);
  }
}

// What probabilities of query q against a reference have to be multiplied with to be its share of the scores.
inline float share_of(const Head& h, int64_t q, float reference) {
  const float mass = h.result->mass[q];
  if (mass == 0) return 0.0f;
  const int64_t heads = h.in.max_of_heads ? 1 : h.in.heads_per_kv;
  return exponential(reference - h.result->maximum[q]) / (mass * static_cast<float>(heads));
}

// Of the group's heads, mean or maximum. The last lane's are mixed with the first one's where `shares` says so.
inline void write_scores(const Head& h) {
  const SpecacheInputs& in = h.in;
  const Sizes& s = h.s;
  for (int64_t lane = in.lanes - in.scored_lanes; lane < in.lanes; lane++) {
    const int64_t first = lane * in.heads_per_kv, last = first + in.heads_per_kv;
    const int64_t row = (lane - in.lanes + in.scored_lanes) * in.batch + h.batch_row;
    float* scores = in.scores + (row * in.kv_heads + h.kv_head) * (s.stored + 1);
    const bool mixed = in.shares != nullptr && lane + 1 == in.lanes && in.scored_lanes == 2;
    const float* others = scores - in.batch * in.kv_heads * (s.stored + 1);  // the first lane's, which are written
    const float weight = mixed ? in.shares[h.batch_row] : 1.0f;
    for (int64_t chunk = 0; chunk < s.chunks; chunk++) {
      const int64_t begin = chunk * s.chunk;
      const int64_t n = in.num_quantized - begin < s.chunk ? in.num_quantized - begin : s.chunk;
      const float* probs = h.probs->stored + chunk * (s.queries - s.first_kept) * s.chunk_pad;
      float share[kMaxQueries];
      for (int64_t q = first; q < last; q++) share[q] = share_of(h, q, h.probs->reference[chunk * s.queries + q]);
      for (int64_t t = 0; t < n; t += kLanes) {
        Floats score{};
        for (int64_t q = first; q < last; q++) {
          const Floats each = load_floats(probs + (q - s.first_kept) * s.chunk_pad + t) * share[q];
          // A maximum that NaN survives, as in the mean.
          score = !in.max_of_heads ? score + each : ((each > score) | (each != each)) ? each : score;
        }
        if (mixed) {
          Floats other{};
          if (t + kLanes <= n)
            other = load_floats(others + begin + t);
          else
            memcpy(&other, others + begin + t, 4 * (n - t));
          score = other + (score - other) * weight;
        }
        if (t + kLanes <= n)
          store(scores + begin + t, score);
        else
          memcpy(scores + begin + t, &score, 4 * (n - t));
      }
    }
    for (int64_t i = 0; i < in.num_staged + in.window_len + 1; i++) {
      const int64_t pair = exact_pair(h, i).pair;
      if (pair < 0) continue;
      float score = 0;
      for (int64_t q = first; q < last; q++) {
        const float reference = h.probs->reference[s.chunks * s.queries + q];
        const float each = h.probs->exact[q * s.exact_pad + i] * share_of(h, q, reference);
        score = !in.max_of_heads ? score + each : each > score || each != each ? each : score;
      }
      scores[pair] = mixed ? others[pair] + (score - others[pair]) * weight : score;
    }
    if (in.key_mask != nullptr)
      for (int64_t t = 0; t < s.stored; t++)
        if (!in.key_mask[h.batch_row * s.stored + t]) scores[t] = -1.0f;
    if (in.visible != nullptr)
      for (int64_t t = 0; t < s.stored; t++)
        if (!h.sees(lane, t)) scores[t] = -1.0f;
  }
}

}  // namespace specache

// The pairs that are there at 16 bits: staged ones, the window, the lanes' own. Plain float arithmetic.
#pragma once

#include "softmax.h"

namespace specache {

// One of them: where its key and value are, and the number of the stored pair that it is (or own pair).
struct ExactPair {
  const void *key, *value;
  int64_t pair;
};

inline ExactPair exact_pair(const Head& h, int64_t i) {
  const SpecacheInputs& in = h.in;
  if (i < in.num_staged) {
    const void* key = h.at(in.staged_rows, i, in.key_dim + in.value_dim);
    return {key, row_of(key, in.key_dim, in.dtype), h.staged()[i]};
  }
  i -= in.num_staged;
  if (i < in.window_len)
    return {h.at(in.window_key, i, in.key_dim), h.at(in.window_value, i, in.value_dim), in.num_quantized + i};
  i -= in.window_len;
  const int64_t row = (i * in.batch + h.batch_row) * in.kv_heads + h.kv_head;
  return {row_of(in.own_key, row * in.key_dim, in.dtype), row_of(in.own_value, row * in.value_dim, in.dtype),
          h.s.stored + i};
}

inline void add_exact(const Head& h) {
  const SpecacheInputs& in = h.in;
  const Sizes& s = h.s;
  float* probs = h.probs->exact;
  for (int64_t q = 0; q < s.queries; q++)
    for (int64_t i = 0; i < s.exact_pad; i++) probs[q * s.exact_pad + i] = -kInfinity;
  for (int64_t i = 0; i < s.exact; i++) {
    const ExactPair pair = exact_pair(h, i), later = exact_pair(h, i + 8 < s.exact ? i + 8 : i);
    prefetch(later.key, in.key_dim * bytes_of(in.dtype));
    prefetch(later.value, in.value_dim * bytes_of(in.dtype));
    if (pair.pair < 0) continue;  // an empty slot
    to_float(h.row, pair.key, in.key_dim, in.dtype);
    memset(h.row + in.key_dim, 0, 4 * (s.key_pad - in.key_dim));
    for (int64_t q = 0; q < s.queries; q++)
      if (h.sees(q / in.heads_per_kv, pair.pair))
        probs[q * s.exact_pad + i] = finished(h, q, pair.pair, dot_floats(h.query + q * s.key_pad, h.row, s.key_pad));
  }
  float* references = h.probs->reference + s.chunks * s.queries;
  float* sums = h.probs->sums + s.chunks * s.queries;
  for (int64_t q = 0; q < s.queries; q++) {
    if (in.sinks != nullptr) {
      const float sink = in.sinks[h.kv_head * in.heads_per_kv + q % in.heads_per_kv];
      h.result->mass[q] += exponential(sink - raise_maximum(h, q, sink));
    }
    to_probs(h, q, probs + q * s.exact_pad, s.exact_pad, references + q, sums + q);
    sums[q] = h.result->mass[q];
  }
  for (int64_t i = 0; i < s.exact; i++) {
    const ExactPair pair = exact_pair(h, i);
    if (pair.pair < 0) continue;
    to_float(h.row, pair.value, in.value_dim, in.dtype);
    for (int64_t q = 0; q < s.queries; q++) {
      const float p = probs[q * s.exact_pad + i];
      float* out = h.result->out + q * s.value_pad;
      // Not where it is hidden: 0 times what a hidden pair holds may be NaN.
      if (p != 0.0f)
        for (int64_t c = 0; c < in.value_dim; c++) out[c] += p * h.row[c];
    }
  }
}

}  // namespace specache

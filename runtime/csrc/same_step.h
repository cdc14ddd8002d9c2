// Same-step selection: between a head's scores and its values, pairs with a large share of the output token's attention
// are read from the host, where they lie. By their codes first: those above `key_share` get the scores of their exact
// keys. Of these, by their shares then, those above `value_share` get their exact values.
#pragma once

#include <vector>

#include "exact.h"
#include "host_rows.h"

namespace specache {

// A head's softmax, and the pairs that are left out of `Probs`.
struct Choice {
  struct Pair {
    int32_t token;
    bool exact;          // its key is read from the host; else it is one that is too large for integers
    const void* value;   // on the host; null where its codes stand for it
  };
  std::vector<Pair> pairs;           // tokens ascend
  std::vector<float> probs;          // [pairs, queries], against `maximum`
  std::vector<float> maximum, mass;  // [queries]
};

// What makes probabilities against `reference` ones against `maximum`. Where a stretch has none, neither is a number.
inline float factor_of(float reference, float sum, float maximum) {
  return sum == 0 ? 0.0f : exponential(reference - maximum);
}

// The share of a group's heads together in a pair, of their own shares.
inline float joined_share(const SpecacheInputs& in, const float* probs, const float* mass) {
  float share = 0;
  for (int64_t q = 0; q < in.heads_per_kv; q++) {
    const float each = probs[q] / mass[q];
    share = in.max_of_heads ? std::max(share, each) : share + each / static_cast<float>(in.heads_per_kv);
  }
  return share;
}

// Of all that has been scored.
inline void add_up(const Head& h, Choice& choice) {
  const Sizes& s = h.s;
  for (int64_t q = 0; q < s.queries; q++) {
    choice.mass[q] = 0;
    for (int64_t i = q; i < (s.chunks + 1) * s.queries; i += s.queries)
      choice.mass[q] += h.probs->sums[i] * factor_of(h.probs->reference[i], h.probs->sums[i], choice.maximum[q]);
  }
}

// Finds the pairs of a chunk that are to be read one by one, and asks for their keys.
inline void find_pairs(Head& h, int64_t chunk, const HostRows& host, int64_t row_bytes, Choice& choice) {
  const SpecacheInputs& in = h.in;
  const Sizes& s = h.s;
  const int64_t first = chunk * s.chunk, n = std::min(s.chunk, in.num_quantized - first);
  const int64_t heads = in.heads_per_kv, row = h.batch_row * in.kv_heads + h.kv_head;
  const float least = 1e-30f;  // a share of 0 asks for all that is seen
  const float bound = std::max(in.key_share, least) * (in.max_of_heads ? 1.0f : static_cast<float>(heads));
  float weights[kMaxQueries];
  h.open(chunk);
  for (int64_t q = 0; q < s.queries; q++) {
    const int64_t i = chunk * s.queries + q;
    const float factor = factor_of(h.probs->reference[i], h.probs->sums[i], choice.maximum[q]);
    weights[q] = factor == 0 ? 0.0f : factor / choice.mass[q];
  }
  constexpr int kVectors = 4;
  for (int64_t t = 0; t < n; t += kVectors * kLanes) {
    Floats shares[kVectors]{}, tops[kVectors]{}, any{};
    for (int64_t q = 0; q < s.queries; q++)
      for (int v = 0; v < kVectors; v++) {
        const Floats share = load_floats(h.probs_of(q) + t + v * kLanes) * weights[q];
        tops[v] = larger(share, tops[v]);
        if (q < heads) shares[v] = in.max_of_heads ? tops[v] : shares[v] + share;
      }
    for (int v = 0; v < kVectors; v++)
      any = larger(larger(shares[v] * (1.0f / bound), tops[v] * (1.0f / kLarge)), any);
    if (!(largest(any) > 1.0f)) continue;
    for (int64_t i = 0; i < kVectors * kLanes; i++) {
      const bool exact = shares[i / kLanes][i % kLanes] > bound;
      if (!exact && !(tops[i / kLanes][i % kLanes] > kLarge)) continue;
      const int64_t token = first + t + i;
      if (exact) ::specache::prefetch(host.row(row, token, row_bytes), in.key_dim * bytes_of(in.dtype));
      choice.pairs.push_back({static_cast<int32_t>(token), exact, nullptr});
    }
  }
}

// A head's softmax with the exact keys in place, once all parts of it have been scored.
template <int BITS>
inline void choose(Head& h, const Result* parts, int64_t num_parts, Choice& choice) {
  const SpecacheInputs& in = h.in;
  const Sizes& s = h.s;
  const int64_t queries = s.queries, head = h.batch_row * in.kv_heads + h.kv_head;
  const int64_t key_bytes = in.key_dim * bytes_of(in.dtype), value_bytes = in.value_dim * bytes_of(in.dtype);
  const HostRows host{in.host, in.host_length};
  choice.pairs.clear();
  choice.maximum.assign(queries, -kInfinity);
  choice.mass.resize(queries);
  for (int64_t q = 0; q < queries; q++)
    for (int64_t i = 0; i < num_parts; i++) choice.maximum[q] = std::max(choice.maximum[q], parts[i].maximum[q]);
  add_up(h, choice);
  for (int64_t chunk = 0; chunk < s.chunks; chunk++) find_pairs(h, chunk, host, key_bytes + value_bytes, choice);
  const int64_t n = choice.pairs.size();
  if (n == 0) return;

  choice.probs.resize(n * queries);
  for (int64_t i = 0; i < n; i++) {
    const int64_t token = choice.pairs[i].token;
    if (choice.pairs[i].exact) {
      to_float(h.row, host.row(head, token, key_bytes + value_bytes), in.key_dim, in.dtype);
      memset(h.row + in.key_dim, 0, 4 * (s.key_pad - in.key_dim));
    } else {
      read_key<BITS>(h, token);
    }
    const float* query = choice.pairs[i].exact ? h.query : h.code_query;
    const int64_t chunk = token / s.chunk;
    h.open(chunk);
    for (int64_t q = 0; q < queries; q++) {
      const bool seen = h.sees(q / in.heads_per_kv, token);
      const float score = seen ? finished(h, q, token, dot_floats(query + q * s.key_pad, h.row, s.key_pad)) : -kInfinity;
      choice.probs[i * queries + q] = score;
      choice.maximum[q] = std::max(choice.maximum[q], score);
      h.probs_of(q)[token - chunk * s.chunk] = 0;
    }
    if (i + 1 < n && choice.pairs[i + 1].token / s.chunk == chunk) continue;
    const int64_t padded = round_up(std::min(s.chunk, in.num_quantized - chunk * s.chunk), 4 * kLanes);
    for (int64_t q = 0; q < queries; q++) h.probs->sums[chunk * queries + q] = sum_of(h.probs_of(q), padded);
  }
  add_up(h, choice);
  for (int64_t i = 0; i < n; i++)
    for (int64_t q = 0; q < queries; q++) {
      float& prob = choice.probs[i * queries + q];
      prob = prob == -kInfinity ? 0.0f : exponential(prob - choice.maximum[q]);
      choice.mass[q] += prob;
    }
  int64_t keys = 0, values = 0;
  for (int64_t i = 0; i < n; i++) {
    Choice::Pair& pair = choice.pairs[i];
    keys += pair.exact;
    if (!pair.exact || !(joined_share(in, choice.probs.data() + i * queries, choice.mass.data()) > in.value_share))
      continue;
    pair.value = host.row(head, pair.token, key_bytes + value_bytes) + key_bytes;
    ::specache::prefetch(pair.value, value_bytes);
    values++;
  }
  __atomic_fetch_add(in.num_read, keys, __ATOMIC_RELAXED);
  __atomic_fetch_add(in.num_read + 1, values, __ATOMIC_RELAXED);
}

// The values of the chunks from `begin` to `end`, once the head's softmax is known.
template <int BITS>
inline void add_chosen(Head& h, int64_t begin, int64_t end, const Choice& choice) {
  const SpecacheInputs& in = h.in;
  const Sizes& s = h.s;
  for (int64_t q = 0; q < s.queries; q++) raise_maximum(h, q, choice.maximum[q]);
  const auto is_before = [](const Choice::Pair& pair, int64_t token) { return pair.token < token; };
  auto pair = std::lower_bound(choice.pairs.begin(), choice.pairs.end(), begin * s.chunk, is_before);
  for (int64_t chunk = begin; chunk < end; chunk++) {
    const int64_t first = chunk * s.chunk, n = std::min(s.chunk, in.num_quantized - first);
    const int64_t padded = round_up(n, 4 * kLanes);
    h.open(chunk);
    for (int64_t q = 0; q < s.queries; q++) {
      float *row = h.probs_of(q), &reference = h.probs->reference[chunk * s.queries + q];
      const float factor = factor_of(reference, h.probs->sums[chunk * s.queries + q], choice.maximum[q]);
      for (int64_t t = 0; factor != 1.0f && t < padded; t += kLanes) store(row + t, load_floats(row + t) * factor);
      reference = choice.maximum[q];
      h.tops[q] = largest_of(row, padded);
    }
    const auto start = pair;
    for (; pair != choice.pairs.end() && pair->token < first + n; pair++) {
      const float* probs = choice.probs.data() + (pair - choice.pairs.begin()) * s.queries;
      if (pair->value != nullptr) to_float(h.row, pair->value, in.value_dim, in.dtype);
      for (int64_t q = 0; q < s.queries; q++) {
        if (probs[q] == 0) continue;
        float* out = h.result->out + q * s.value_pad;
        if (pair->value == nullptr)
          add_value<BITS>(h, pair->token, q, probs[q]);
        else
          for (int64_t c = 0; c < in.value_dim; c++) out[c] += probs[q] * h.row[c];
      }
    }
    add_stored<BITS>(h, first, n);
    for (auto each = start; each != pair; each++)  // selection scores are of all
      for (int64_t q = 0; q < s.queries; q++)
        h.probs_of(q)[each->token - first] = choice.probs[(each - choice.pairs.begin()) * s.queries + q];
  }
}

}  // namespace specache

// Same-step selection: between a head's scores and its values, pairs with a large share of the output token's attention
// are read from the host, where they lie. By their codes first: those that may be above `key_share` get the scores of
// their exact keys. Of these, by their shares then, those above `value_share` get their exact values.
//
// A score by codes is off by a standard deviation that is known: a part of a step of each code, times the query. A pair
// may have e to the power of it times the share that it seems to have.
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
  // Of a chunk's scores: [tokens] of centred codes, times `norms`; else [queries, groups].
  std::vector<float> deviations;
  std::vector<float> norms;          // [queries]
};

// The standard deviation of a code's error in steps, of evenly spread errors and of the rotated ones alike.
constexpr float kCodeError = 0.3f;
constexpr float kMostDeviation = 20.0f;

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

// Of each score of a chunk, the standard deviation of what its codes leave out. Leaves the largest of each query.
inline void deviations_of(const Head& h, int64_t first, int64_t n, Choice& choice, float* largest_deviation) {
  const SpecacheInputs& in = h.in;
  const Sizes& s = h.s;
  if (in.centred) {
    choice.deviations.assign(s.chunk_pad, 0.0f);
    to_float(choice.deviations.data(), h.at(in.key_scale, first, 1), n, in.dtype);
    const float top = largest_of(choice.deviations.data(), round_up(n, kLanes));
    for (int64_t q = 0; q < s.queries; q++) {
      const float* query = h.code_query + q * s.key_pad;
      choice.norms[q] = kCodeError * std::sqrt(dot_floats(query, query, s.key_pad));
      largest_deviation[q] = std::min(choice.norms[q] * top, kMostDeviation);
    }
    return;
  }
  const int64_t groups = n / in.group_size;
  choice.deviations.resize(s.queries * groups);
  std::fill(largest_deviation, largest_deviation + s.queries, 0.0f);
  for (int64_t g = 0; g < groups; g++) {
    to_float(h.spare, h.at(in.key_scale, first / in.group_size + g, in.key_dim), in.key_dim, in.dtype);
    for (int64_t q = 0; q < s.queries; q++) {
      float sum = 0;
      for (int64_t c = 0; c < in.key_dim; c++) {
        const float each = h.query[q * s.key_pad + c] * h.spare[c];
        sum += each * each;
      }
      const float deviation = std::min(kCodeError * std::sqrt(sum), kMostDeviation);
      choice.deviations[q * groups + g] = deviation;
      largest_deviation[q] = std::max(largest_deviation[q], deviation);
    }
  }
}

// What the share of some pairs may be multiplied with.
inline Floats margin_of(const Head& h, const Choice& choice, int64_t q, int64_t n, int64_t at) {
  Floats deviation;
  if (h.in.centred) {
    deviation = load_floats(choice.deviations.data() + at) * choice.norms[q];
    deviation = deviation > kMostDeviation ? splat(kMostDeviation) : deviation;
  } else {
    const int64_t groups = n / h.in.group_size;
    for (int64_t i = 0; i < kLanes; i++)
      deviation[i] = choice.deviations[q * groups + std::min((at + i) / h.in.group_size, groups - 1)];
  }
  return exponential(deviation);
}

// Finds the pairs of a chunk that are to be read one by one, and asks for their keys.
inline void find_pairs(Head& h, int64_t chunk, const HostRows& host, int64_t row_bytes, Choice& choice) {
  const SpecacheInputs& in = h.in;
  const Sizes& s = h.s;
  const int64_t first = chunk * s.chunk, n = std::min(s.chunk, in.num_quantized - first);
  const int64_t heads = in.heads_per_kv, row = h.batch_row * in.kv_heads + h.kv_head;
  const float least = 1e-30f;  // a share of 0 asks for all that is seen
  const float bound = std::max(in.key_share, least) * (in.max_of_heads ? 1.0f : static_cast<float>(heads));
  float weights[kMaxQueries], margins[kMaxQueries];
  h.open(chunk);
  deviations_of(h, first, n, choice, margins);
  for (int64_t q = 0; q < s.queries; q++) {
    const int64_t i = chunk * s.queries + q;
    const float factor = factor_of(h.probs->reference[i], h.probs->sums[i], choice.maximum[q]);
    weights[q] = factor == 0 ? 0.0f : factor / choice.mass[q];
    margins[q] = exponential(margins[q]);
  }
  constexpr int kVectors = 4;
  for (int64_t t = 0; t < n; t += kVectors * kLanes) {
    Floats shares[kVectors]{}, tops[kVectors]{}, any{};
    for (int64_t q = 0; q < s.queries; q++)
      for (int v = 0; v < kVectors; v++) {
        const Floats share = load_floats(h.probs_of(q) + t + v * kLanes) * weights[q], most = share * margins[q];
        tops[v] = larger(share, tops[v]);
        if (q < heads) shares[v] = in.max_of_heads ? larger(most, shares[v]) : shares[v] + most;
      }
    for (int v = 0; v < kVectors; v++)
      any = larger(larger(shares[v] * (1.0f / bound), tops[v] * (1.0f / kLarge)), any);
    if (!(largest(any) > 1.0f)) continue;
    for (int v = 0; v < kVectors && t + v * kLanes < n; v++) {
      shares[v] = Floats{};
      for (int64_t q = 0; q < heads; q++) {
        const int64_t at = t + v * kLanes;
        const Floats most = load_floats(h.probs_of(q) + at) * weights[q] * margin_of(h, choice, q, n, at);
        shares[v] = in.max_of_heads ? larger(most, shares[v]) : shares[v] + most;
      }
    }
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
  choice.norms.resize(queries);
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

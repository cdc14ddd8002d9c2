// `Head`: one (batch row, kv head) of a call, or a stretch of its tokens, with all that is being computed of it.
#pragma once

#include <algorithm>
#include <cmath>

#include "inputs.h"
#include "vec.h"

namespace specache {

constexpr int64_t kChunk = 2048;     // tokens whose probabilities are taken together
constexpr int64_t kMaxQueries = 1024; // rows of one kv head that Python may ask for
constexpr int64_t kValueBlock = 256;  // tokens of values that are multiplied together; a multiple of 4 * kLanes

// Sizes that follow from the inputs, once a call. Floats are padded with zeros to whole vectors.
struct Sizes {
  explicit Sizes(const SpecacheInputs& in) {
    const int64_t per_byte = in.bits < 8 ? 8 / in.bits : 1, digits = in.bits < 8 ? 1 : 2;
    queries = in.lanes * in.heads_per_kv;
    first_kept = in.chooses ? 0 : (in.lanes - in.scored_lanes) * in.heads_per_kv;
    stored = in.num_quantized + in.window_len;
    exact = in.num_staged + in.window_len + in.lanes;
    exact_pad = round_up(exact, kLanes);
    key_bytes = (in.key_dim * in.bits + 7) / 8;
    value_bytes = (in.value_dim * in.bits + 7) / 8;
    key_words = round_up(key_bytes, 4) / 4;
    key_steps = key_words * per_byte;
    key_pad = round_up(key_steps, kLanes) * 4;
    group_pad = round_up(in.group_size, kLanes);
    value_pad = round_up(in.value_dim, 16);
    value_groups = (in.value_dim + in.value_group - 1) / in.value_group;
    group_bytes = (in.value_group * in.bits + 7) / 8;
    value_copies = 1;  // see `load_copies`
    for (int64_t copies = 2; copies <= 4; copies *= 2)
      if (group_bytes * copies == kLanes && per_byte % copies == 0) value_copies = copies;
    column_pad = value_copies > 1 ? group_bytes : round_up(group_bytes, kLanes);
    columns = column_pad * per_byte;
    words_pad = round_up(value_groups * group_bytes, 16) + kLanes;
    chunk = in.group_size < kChunk ? kChunk / in.group_size * in.group_size : in.group_size;  // whole groups
    chunks = (in.num_quantized + chunk - 1) / chunk;
    chunk_pad = round_up(chunk, 4 * kLanes);
    const int64_t key_raw = round_up(key_bytes, 16) / 4 * group_pad, value_raw = kValueBlock / 4 * words_pad;
    words = key_raw > value_raw ? key_raw : value_raw;
    value_sums = digits * 2 * queries * columns;
    const int64_t key_sums = digits * 2 * queries * group_pad;
    sums = key_sums > value_groups * value_sums ? key_sums : value_groups * value_sums;
    factors = 2 * queries * (key_pad > kValueBlock ? key_pad : kValueBlock) / 4;
    dims = key_pad > value_pad ? key_pad : value_pad;
  }

  int64_t queries, first_kept, stored, exact, exact_pad, chunk, chunks, chunk_pad;
  int64_t key_bytes, key_words, key_steps, key_pad, group_pad;
  int64_t value_bytes, value_pad, value_groups, group_bytes, value_copies, column_pad, columns, words_pad;
  int64_t words, sums, value_sums, factors, dims;
};

// Hands out parts of one allocation; without one it only counts.
struct Scratch {
  char* base;
  int64_t used = 0;
  template <class T>
  T* take(int64_t n) {
    T* part = reinterpret_cast<T*>(base + used);
    used = round_up(used + n * static_cast<int64_t>(sizeof(T)), 64);
    return base == nullptr ? nullptr : part;
  }
};

// What a head, or a part of one, has come to: softmax over what it has read so far, not yet divided by its mass.
struct Result {
  Result(Scratch& scratch, const Sizes& s) {
    maximum = scratch.take<float>(s.queries);
    mass = scratch.take<float>(s.queries);
    out = scratch.take<float>(s.queries * s.value_pad);
  }
  float *maximum, *mass;  // [queries]
  float* out;             // [queries, value_pad]
};

// Probabilities, each e^(score - reference), kept until the whole mass is known: selection goes by them.
struct Probs {
  Probs(Scratch& scratch, const Sizes& s) {
    stored = scratch.take<float>(s.chunks * (s.queries - s.first_kept) * s.chunk_pad);
    exact = scratch.take<float>(s.queries * s.exact_pad);
    reference = scratch.take<float>((s.chunks + 1) * s.queries);
    sums = scratch.take<float>((s.chunks + 1) * s.queries);
  }
  float* stored;     // [chunks, kept queries, chunk_pad]: of the codes
  float* exact;      // [queries, exact_pad]: staged, window, own
  float* reference;  // [chunks + 1, queries]: the last is of `exact`
  float* sums;       // likewise, of what is summed; the last with the sinks' share
};

// A probability that is large enough for its pair to be read in float arithmetic.
struct Large {
  int64_t query, token;
  float prob;
};

struct Head {
  Head(const SpecacheInputs& in, const Sizes& s, Scratch& scratch) : in(in), s(s) {
    query = scratch.take<float>(s.queries * s.key_pad);
    packed_query = scratch.take<float>(s.queries * s.key_pad);
    scaled_query = scratch.take<float>(s.queries * s.key_pad);
    code_query = in.centred ? scratch.take<float>(s.queries * s.key_pad) : query;
    rotated_out = in.centred ? scratch.take<float>(s.queries * s.value_pad) : nullptr;
    token_scales = scratch.take<float>(in.centred ? s.chunk_pad + kLanes : 0);
    row = scratch.take<float>(s.dims);
    spare = scratch.take<float>(s.dims);
    key_scales = scratch.take<float>(s.chunk / in.group_size * s.key_pad);
    key_middles = scratch.take<float>(s.chunk / in.group_size * s.key_pad);
    value_rows = scratch.take<float>(s.value_groups * s.chunk);
    value_scales = scratch.take<float>(s.value_groups * s.chunk_pad);
    value_middles = scratch.take<float>(s.value_groups * s.chunk_pad);
    passing_probs = scratch.take<float>(s.first_kept * s.chunk_pad);
    steps = scratch.take<float>(s.queries);
    offsets = scratch.take<float>(s.queries);
    means = scratch.take<float>(s.queries);
    tops = scratch.take<float>(s.queries);
    value_steps = scratch.take<float>(s.queries * s.value_groups);
    packed_out = scratch.take<float>(s.queries * s.value_groups * s.columns);
    constants = scratch.take<float>(s.queries * s.value_groups * kLanes);
    large = scratch.take<Large>(64 * s.queries);
    words = scratch.take<int32_t>(s.words);
    factors = scratch.take<int32_t>(s.factors);
    sums = scratch.take<int32_t>(s.sums);
  }

  const SpecacheInputs& in;
  const Sizes& s;
  int64_t batch_row = 0, kv_head = 0;
  float root_key_dim = std::sqrt(static_cast<float>(in.key_dim));
  Result* result = nullptr;
  Probs* probs = nullptr;

  float* query;         // [queries, key_pad], times `scale`
  float* code_query;    // the same in the basis of the codes: rotated, where they are
  float* packed_query;  // that in the order of `packed_order`
  float* scaled_query;  // that in steps of a chunk's factors
  float* rotated_out;   // [queries, value_pad]: what joins `out` once it is rotated back; null where nothing is rotated
  float* token_scales;  // [chunk_pad]: scales of a chunk's keys, divided by the largest; of centred codes
  float *row, *spare;   // one key or value each
  // Of a chunk, [groups, key_pad] in the order of packed_query and [value_groups, chunk_pad]. "Middles" are what the code
  // in the middle of the range stands for.
  float *key_scales, *key_middles, *value_rows, *value_scales, *value_middles;
  float* passing_probs;         // [queries whose probabilities are not kept, chunk_pad]
  float* kept_probs = nullptr;  // [the others, chunk_pad], of this chunk in `probs`
  float *steps, *offsets;   // [queries]: what a score's integers are worth, and what is added to them
  float* means;             // [queries]: the product with the mean key of a group; of centred codes
  float* tops;              // [queries]: the largest probability of a chunk
  float* value_steps;       // [queries, value_groups]
  float* packed_out;  // [queries, value_groups, columns]: the codes' share of `out`
  float* constants;   // [queries, value_groups, kLanes]: what all channels of a group get, to be summed
  Large* large;       // [queries, 64]
  int32_t *words, *factors, *sums;

  // Scores of a chunk, then probabilities, [chunk_pad].
  float* probs_of(int64_t q) const {
    return q < s.first_kept ? passing_probs + q * s.chunk_pad : kept_probs + (q - s.first_kept) * s.chunk_pad;
  }
  // The chunk that `probs_of` is about.
  void open(int64_t chunk) { kept_probs = probs->stored + chunk * (s.queries - s.first_kept) * s.chunk_pad; }
  const void* at(const SpecachePlane& plane, int64_t row, int64_t width) const {
    return row_of(plane.data, batch_row * plane.batch_stride + kv_head * plane.head_stride + row * width, in.dtype);
  }
  // Tokens of the staged pairs, [num_staged].
  const int32_t* staged() const {
    return in.staged_indices + (batch_row * in.staged_heads + kv_head % in.staged_heads) * in.num_staged;
  }
  // [queries, value_pad]: where values that codes stand for are summed.
  float* code_out() const { return rotated_out != nullptr ? rotated_out : result->out; }
  const uint8_t* codes_at(const SpecachePlane& plane, int64_t row, int64_t width) const {
    return static_cast<const uint8_t*>(plane.data) + batch_row * plane.batch_stride + kv_head * plane.head_stride +
           row * width;
  }
  // Row of query q in a tensor [lanes, batch, heads, ...].
  int64_t query_row(int64_t q) const {
    const int64_t lane = q / in.heads_per_kv, head = kv_head * in.heads_per_kv + q % in.heads_per_kv;
    return (lane * in.batch + batch_row) * in.kv_heads * in.heads_per_kv + head;
  }
  const float* bias_of(int64_t q) const {
    const int64_t lane = q / in.heads_per_kv, head = kv_head * in.heads_per_kv + q % in.heads_per_kv;
    return in.bias + lane * in.bias_lane_stride + batch_row * in.bias_batch_stride + head * in.bias_head_stride;
  }
  // Has no scales of padding, so that it counts for nothing in the step that a chunk's numbers share.
  void drop_padding(int64_t first, int64_t tokens, float* scales) const {
    if (in.key_mask == nullptr) return;
    const uint8_t* real = in.key_mask + batch_row * s.stored + first;
    for (int64_t t = 0; t < tokens; t++)
      if (!real[t]) scales[t] = 0;
  }
  // Whether all tokens of a group are padding.
  bool is_padding(int64_t group) const {
    if (in.key_mask == nullptr) return false;
    const uint8_t* real = in.key_mask + batch_row * s.stored + group * in.group_size;
    return std::none_of(real, real + in.group_size, [](uint8_t each) { return each != 0; });
  }
  // Whether a lane sees the pair of that number: stored ones, then the lanes' own.
  bool sees(int64_t lane, int64_t pair) const {
    if (pair < s.stored && in.key_mask != nullptr && !in.key_mask[batch_row * s.stored + pair]) return false;
    if (in.visible != nullptr) return in.visible[(lane * in.batch + batch_row) * (s.stored + in.lanes) + pair];
    const int64_t own = pair - s.stored;
    return own < 0 || own == lane || (own < lane && !in.independent_lanes);
  }
};

}  // namespace specache

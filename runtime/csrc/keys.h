// Scores of low-bit keys without bringing them back: q . K'_t = sum_c (q_c s_c) code_tc + sum_c q_c z_c, where the scales
// s and zeros z are those of the token's group. The factors q_c s_c become integers once a group and query.
#pragma once

#include "factors.h"

namespace specache {

// n is a multiple of 4 * kLanes.
inline float dot_floats(const float* a, const float* b, int64_t n) {
  Floats total[4]{};
  for (int64_t i = 0; i < n; i += 4 * kLanes)
    for (int j = 0; j < 4; j++) total[j] += load_floats(a + i + j * kLanes) * load_floats(b + i + j * kLanes);
  return sum((total[0] + total[1]) + (total[2] + total[3]));
}

// The error of scores (rms) from factors of so many bytes, the largest of which is `top`. The rounding of a factor is spread
// evenly over a step, and codes, less their mean, evenly over their range.
template <int BITS>
inline float error_of_scores(const Head& h, float top, int64_t bytes) {
  return top / kLimit[bytes] * Format<BITS>::kMaxCode * h.root_key_dim / 12.0f;
}

// Scores of tens of thousands are rounded by more than this at two bytes. Then float arithmetic has to do: what is off by
// tens of units makes other tokens win.
constexpr float kMostError = 0.25f;

// Reads scales and zeros of a chunk of tokens, `groups` groups from `first` on. Leaves in `h.row` the largest scale of each
// channel.
template <int BITS>
inline void read_affine(const Head& h, int64_t first, int64_t groups) {
  const Sizes& s = h.s;
  for (int64_t g = 0; g < groups; g++) {
    float *scales = h.key_scales + g * s.key_pad, *middles = h.key_middles + g * s.key_pad;
    to_float(h.spare, h.at(h.in.key_zero, first + g, h.in.key_dim), h.in.key_dim, h.in.dtype);
    packed_order<BITS>(h.spare, s.key_steps, middles);
    to_float(h.spare, h.at(h.in.key_scale, first + g, h.in.key_dim), h.in.key_dim, h.in.dtype);
    if (h.is_padding(first + g)) memset(h.spare, 0, 4 * h.in.key_dim);
    packed_order<BITS>(h.spare, s.key_steps, scales);
  }
  // In a loop of its own: what was just written in pieces is slow to be read in vectors.
  for (int64_t g = 0; g < groups; g++) {
    float *scales = h.key_scales + g * s.key_pad, *middles = h.key_middles + g * s.key_pad;
    for (int64_t i = 0; i < s.key_pad; i += kLanes) {
      const Floats scale = load_floats(scales + i);
      store(middles + i, load_floats(middles + i) + scale * (Format<BITS>::kMaxCode / 2.0f));
      store(h.row + i, larger(magnitude(scale), load_floats(h.row + i)));
    }
  }
}

// The same for centred codes. A token's scale is taken out of the product: the factors are the query's numbers, times the
// largest scale of the chunk, for all of its groups.
template <int BITS>
inline void read_centred(const Head& h, int64_t first, int64_t groups) {
  const Sizes& s = h.s;
  const int64_t tokens = groups * h.in.group_size, padded = round_up(tokens, kLanes);
  to_float(h.token_scales, h.at(h.in.key_scale, first * h.in.group_size, 1), tokens, h.in.dtype);
  h.drop_padding(first * h.in.group_size, tokens, h.token_scales);
  for (int64_t t = tokens; t < padded; t++) h.token_scales[t] = 0;
  Floats tops{};
  for (int64_t t = 0; t < padded; t += kLanes) tops = larger(load_floats(h.token_scales + t), tops);
  const float top = largest(tops), inverse = inverse_of(top);
  for (int64_t t = 0; t < padded; t += kLanes) store(h.token_scales + t, load_floats(h.token_scales + t) * inverse);
  for (int64_t g = 0; g < groups; g++) {
    to_float(h.spare, h.at(h.in.key_zero, first + g, h.in.key_dim), h.in.key_dim, h.in.dtype);
    packed_order<BITS>(h.spare, s.key_steps, h.key_middles + g * s.key_pad);
  }
  for (int64_t i = 0; i < s.key_pad; i += kLanes) {
    store(h.key_scales + i, splat(top));
    store(h.row + i, splat(top));
  }
}

// Reads scales and zeros, and fits the factors' steps to them. Returns how many bytes a factor gets; 0: no integers will do.
template <int BITS>
inline int64_t start_keys(const Head& h, int64_t first, int64_t groups) {
  const Sizes& s = h.s;
  memset(h.row, 0, 4 * s.key_pad);
  memset(h.spare, 0, 4 * s.dims);
  if (h.in.centred)
    read_centred<BITS>(h, first, groups);
  else
    read_affine<BITS>(h, first, groups);
  float top = 0;
  for (int64_t q = 0; q < s.queries; q++) {
    h.steps[q] = largest_product(h.packed_query + q * s.key_pad, h.row, s.key_pad);
    top = h.steps[q] > top ? h.steps[q] : top;
  }
  if (!(error_of_scores<BITS>(h, top, 2) <= kMostError)) return 0;
  const int64_t bytes = h.in.tolerance > 0 && error_of_scores<BITS>(h, top, 1) <= h.in.tolerance ? 1 : 2;
  for (int64_t q = 0; q < s.queries; q++) {
    h.steps[q] *= 1.0f / kLimit[bytes];
    const float inverse = inverse_of(h.steps[q]);
    for (int64_t i = 0; i < s.key_pad; i += kLanes)
      store(h.scaled_query + q * s.key_pad + i, load_floats(h.packed_query + q * s.key_pad + i) * inverse);
  }
  return bytes;
}

// Scores of the tokens of group `first + g` to `probs_of`, products alone.
template <int BITS, int BYTES>
inline void score_group(const Head& h, int64_t first, int64_t g) {
  using F = Format<BITS>;
  const Sizes& s = h.s;
  const int64_t tokens = h.in.group_size, digit_size = s.queries * BYTES * s.group_pad;
  const uint8_t* codes = h.codes_at(h.in.key_codes, (first + g) * tokens, s.key_bytes);
  words_by_channel(codes, s.key_bytes, tokens, h.words, s.group_pad);
  const float *scales = h.key_scales + g * s.key_pad, *middles = h.key_middles + g * s.key_pad;
  for (int64_t q = 0; q < s.queries; q++) {
    if (h.in.centred) h.means[q] = dot_floats(h.packed_query + q * s.key_pad, middles, s.key_pad);
    if (h.in.centred && g > 0) continue;  // the factors are those of the chunk's first group
    Floats middle{};
    const Ints integers = round_factors<BYTES, false, false>(
        h.scaled_query + q * s.key_pad, scales, 1.0f, nullptr, s.key_pad, h.packed_query + q * s.key_pad, middles,
        middle, h.factors + BYTES * q * s.key_pad / 4);
    const Floats rounding = to_floats(integers) * (h.steps[q] * (F::kMaxCode / 2.0f));
    h.offsets[q] = h.in.centred ? -sum(rounding) : sum(middle - rounding);
  }
  products<BITS, F::kPerByte>({h.words, s.group_pad, s.key_words, s.group_pad}, h.factors, s.key_pad / 4, h.sums,
                              s.queries * BYTES, s.group_pad, false, codes + kAhead, tokens * s.key_bytes);
  for (int64_t q = 0; q < s.queries; q++) {
    const int32_t* sums = h.sums + q * BYTES * s.group_pad;
    float* scores = h.probs_of(q) + g * tokens;
    for (int64_t t = 0; t < tokens; t += kLanes) {
      Floats score = joined<BITS>(sums, digit_size, s.group_pad, t, BYTES) * h.steps[q] + h.offsets[q];
      if (h.in.centred) score = score * load_floats(h.token_scales + g * tokens + t) + h.means[q];
      if (t + kLanes <= tokens)
        store(scores + t, score);
      else
        memcpy(scores + t, &score, 4 * (tokens - t));
    }
  }
}

// Leaves the key of one token in `h.row`, in float arithmetic.
template <int BITS>
inline void read_key(const Head& h, int64_t token) {
  using F = Format<BITS>;
  const uint8_t* codes = h.codes_at(h.in.key_codes, token, h.s.key_bytes);
  const int64_t group = token / h.in.group_size;
  const int64_t dim = h.in.key_dim;
  to_float(h.row, h.at(h.in.key_zero, group, dim), dim, h.in.dtype);
  memset(h.row + dim, 0, 4 * (h.s.key_pad - dim));
  if (h.in.centred)
    to_float(h.spare, h.at(h.in.key_scale, token, 1), 1, h.in.dtype);
  else
    to_float(h.spare, h.at(h.in.key_scale, group, dim), dim, h.in.dtype);
  for (int64_t c = 0; c < dim; c++) {
    const float code = static_cast<float>(codes[c / F::kPerByte] >> (c % F::kPerByte * BITS) & F::kMaxCode);
    h.row[c] += h.in.centred ? h.spare[0] * (code - F::kMaxCode / 2.0f) : h.spare[c] * code;
  }
}

// The score of the key in `h.row`.
inline float score_row(const Head& h, int64_t q) {
  return dot_floats(h.code_query + q * h.s.key_pad, h.row, h.s.key_pad);
}

// Scores of a chunk, whole groups.
template <int BITS>
inline void score_chunk(const Head& h, int64_t first, int64_t tokens) {
  const int64_t size = h.in.group_size, groups = tokens / size;
  const int64_t bytes = start_keys<BITS>(h, first / size, groups);
  for (int64_t t = 0; bytes == 0 && t < tokens; t++) {
    read_key<BITS>(h, first + t);
    for (int64_t q = 0; q < h.s.queries; q++) h.probs_of(q)[t] = score_row(h, q);
  }
  for (int64_t g = 0; bytes > 0 && g < groups; g++) {
    if (bytes == 1)
      score_group<BITS, 1>(h, first / size, g);
    else
      score_group<BITS, 2>(h, first / size, g);
  }
}

}  // namespace specache

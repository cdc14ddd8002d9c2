// Values of low-bit pairs, weighted: p . V'_c = sum_t (p_t s_t) code_tc + sum_t p_t z_t, where the scales s and zeros z
// are those of the token and the channel's group. The factors p_t s_t become integers.
#pragma once

#include "keys.h"
#include "rotation.h"

namespace specache {

// Rows [tokens, groups] of the KV dtype to float [groups, chunk_pad].
template <int GROUPS>
inline void by_group(const Head& h, const void* from, int64_t tokens, float* to) {
  const int64_t n = GROUPS > 0 ? GROUPS : h.s.value_groups;
  if (GROUPS == 2 && h.in.dtype == kBFloat16) {  // a word has both; behind the end zeros are put later
    const char* words = static_cast<const char*>(from);
    for (int64_t t = 0; t < tokens; t += kLanes) {
      Ints word{};
      if (t + kLanes <= tokens)
        word = load<Ints>(words + 4 * t);
      else
        memcpy(&word, words + 4 * t, 4 * (tokens - t));
      store(to + t, word << 16);
      store(to + h.s.chunk_pad + t, word & static_cast<int32_t>(0xffff0000));
    }
    return;
  }
  to_float(n == 1 ? to : h.value_rows, from, tokens * n, h.in.dtype);
  if (n == 1) return;
  for (int64_t g = 0; g < n; g++)
    for (int64_t t = 0; t < tokens; t++) to[g * h.s.chunk_pad + t] = h.value_rows[t * n + g];
}

inline void by_group(const Head& h, const void* from, int64_t tokens, float* to) {
  if (h.s.value_groups == 1) return by_group<1>(h, from, tokens, to);
  if (h.s.value_groups == 2) return by_group<2>(h, from, tokens, to);
  if (h.s.value_groups == 4) return by_group<4>(h, from, tokens, to);
  by_group<0>(h, from, tokens, to);
}

// Added to a token's factors of one byte before they are cut to integers: many small ones are then right in the mean, where
// they would all have become 0. Multiples of the golden ratio, so that any few in a row are spread evenly. At two bytes
// nothing is so small. No probability in here is above 1/64 of the mass, see `recompute_large`: one byte then leaves an
// error of at most 1e-3 (rms) of the range of the values.
struct Dither {
  float at[kValueBlock];
  Dither() : at() {
    for (int64_t t = 0; t < kValueBlock; t++) {
      const double turns = static_cast<double>(t) * 0.6180339887498949;
      at[t] = kFloor + static_cast<float>(turns - static_cast<double>(static_cast<int64_t>(turns)));
    }
  }
};
static const Dither kDither;

// Values of a block of a chunk: `tokens` <= kValueBlock of them from the chunk's `first` + `at` on.
template <int BITS, int BYTES>
inline void add_block(const Head& h, int64_t first, int64_t at, int64_t tokens) {
  using F = Format<BITS>;
  const Sizes& s = h.s;
  const int64_t padded = round_up(tokens, 4 * kLanes), steps = padded / 4;
  const uint8_t* codes = h.codes_at(h.in.value_codes, first + at, s.value_bytes);
  words_by_token(codes, s.value_bytes, tokens, h.words, s.words_pad);
  for (int64_t g = 0; g < s.value_groups; g++) {
    const float *scales = h.value_scales + g * s.chunk_pad + at, *middles = h.value_middles + g * s.chunk_pad + at;
    for (int64_t q = 0; q < s.queries; q++) {
      const float *p = h.probs_of(q) + at, step = h.value_steps[q * s.value_groups + g];
      Floats middle{};
      const Ints integers = round_factors<BYTES, BYTES == 1, true>(p, scales, inverse_of(h.tops[q]), kDither.at, padded, p,
                                                                   middles, middle, h.factors + BYTES * q * steps);
      float* constants = h.constants + (q * s.value_groups + g) * kLanes;
      store(constants, load_floats(constants) + middle - to_floats(integers) * (step * (F::kMaxCode / 2.0f)));
    }
    const Codes words{h.words + g * s.group_bytes, s.words_pad, steps, s.column_pad};
    int32_t* sums = h.sums + g * s.value_sums;
    const int64_t share = tokens * s.value_bytes / s.value_groups;
    const uint8_t* next = codes + kAhead + g * share;
    if (s.value_copies == 1)
      products<BITS, 1>(words, h.factors, steps, sums, s.queries * BYTES, s.columns, at > 0, next, share);
    if (s.value_copies == 2)
      products<BITS, 1, 2>(words, h.factors, steps, sums, s.queries * BYTES, s.columns, at > 0, next, share);
    if (s.value_copies == 4)
      products<BITS, 1, 4>(words, h.factors, steps, sums, s.queries * BYTES, s.columns, at > 0, next, share);
  }
}

// Adds the values of a chunk, `tokens` from `first` on, weighted by `probs_of`.
template <int BITS, int BYTES>
inline void add_values(const Head& h, int64_t first, int64_t tokens) {
  const Sizes& s = h.s;
  by_group(h, h.at(h.in.value_scale, first, s.value_groups), tokens, h.value_scales);
  if (!h.in.centred) by_group(h, h.at(h.in.value_zero, first, s.value_groups), tokens, h.value_middles);
  for (int64_t g = 0; g < s.value_groups; g++) {
    float *scales = h.value_scales + g * s.chunk_pad, *middles = h.value_middles + g * s.chunk_pad;
    h.drop_padding(first, tokens, scales);
    memset(scales + tokens, 0, 4 * (s.chunk_pad - tokens));
    memset(middles + tokens, 0, 4 * (s.chunk_pad - tokens));
    Floats tops{};
    for (int64_t t = 0; t < s.chunk_pad; t += kLanes) tops = larger(magnitude(load_floats(scales + t)), tops);
    const float top = largest(tops), inverse = inverse_of(top / kLimit[BYTES]);
    for (int64_t t = 0; t < s.chunk_pad; t += kLanes) {
      const Floats scale = load_floats(scales + t);
      // What the middle code stands for; of centred codes the mean, which `add_means` adds.
      const Floats middle = load_floats(middles + t) + scale * (Format<BITS>::kMaxCode / 2.0f);
      store(middles + t, h.in.centred ? Floats{} : middle);
      store(scales + t, scale * inverse);
    }
    for (int64_t q = 0; q < s.queries; q++) h.value_steps[q * s.value_groups + g] = h.tops[q] * top / kLimit[BYTES];
  }
  for (int64_t at = 0; at < tokens; at += kValueBlock)
    add_block<BITS, BYTES>(h, first, at, tokens - at < kValueBlock ? tokens - at : kValueBlock);
  const int64_t digit_size = s.queries * BYTES * s.columns;
  for (int64_t q = 0; q < s.queries; q++) {
    for (int64_t g = 0; g < s.value_groups; g++) {
      float* out = h.packed_out + (q * s.value_groups + g) * s.columns;
      const int32_t* sums = h.sums + g * s.value_sums + q * BYTES * s.columns;
      const float step = h.value_steps[q * s.value_groups + g];
      for (int64_t n = 0; n < s.columns; n += kLanes)
        store(out + n, load_floats(out + n) + joined<BITS>(sums, digit_size, s.columns, n, BYTES) * step);
    }
  }
}

// Adds the mean values of a chunk's groups, weighted by the groups' share of `probs_of`; of centred codes.
inline void add_means(const Head& h, int64_t first, int64_t tokens) {
  const int64_t size = h.in.group_size, dim = h.in.value_dim;
  for (int64_t at = 0; at < tokens; at += size) {
    to_float(h.row, h.at(h.in.value_zero, (first + at) / size, dim), dim, h.in.dtype);
    for (int64_t q = 0; q < h.s.queries; q++) {
      const float* p = h.probs_of(q) + at;
      float share = 0;
#pragma omp simd reduction(+ : share)
      for (int64_t t = 0; t < size; t++) share += p[t];
      float* out = h.code_out() + q * h.s.value_pad;
#pragma omp simd
      for (int64_t c = 0; c < dim; c++) out[c] += share * h.row[c];
    }
  }
}

// out[q] += p times the value of one token, in float arithmetic.
template <int BITS>
inline void add_value(const Head& h, int64_t token, int64_t q, float p) {
  using F = Format<BITS>;
  const Sizes& s = h.s;
  const uint8_t* codes = h.codes_at(h.in.value_codes, token, s.value_bytes);
  to_float(h.spare, h.at(h.in.value_scale, token, s.value_groups), s.value_groups, h.in.dtype);
  if (h.in.centred)
    to_float(h.row, h.at(h.in.value_zero, token / h.in.group_size, h.in.value_dim), h.in.value_dim, h.in.dtype);
  else
    to_float(h.row, h.at(h.in.value_zero, token, s.value_groups), s.value_groups, h.in.dtype);
  float* out = h.code_out() + q * s.value_pad;
  for (int64_t c = 0; c < h.in.value_dim; c++) {
    const float code = static_cast<float>(codes[c / F::kPerByte] >> (c % F::kPerByte * BITS) & F::kMaxCode);
    const int64_t g = c / h.in.value_group;
    out[c] += p * (h.in.centred ? h.spare[0] * (code - F::kMaxCode / 2.0f) + h.row[c] : h.spare[g] * code + h.row[g]);
  }
}

// The codes' share, which is in the order of the fields, to where the channels are in `out`, rotated back.
template <int BITS>
inline void join_out(const Head& h) {
  using F = Format<BITS>;
  const Sizes& s = h.s;
  for (int64_t row = 0; row < s.queries * s.value_groups; row++)
    h.constants[row * kLanes] = sum(load_floats(h.constants + row * kLanes));
  for (int64_t q = 0; q < s.queries; q++) {
    for (int64_t c = 0; c < h.in.value_dim; c++) {
      const int64_t g = c / h.in.value_group, in_group = c % h.in.value_group;
      const int64_t n = in_group % F::kPerByte * s.column_pad + in_group / F::kPerByte;
      const int64_t row = q * s.value_groups + g;
      h.code_out()[q * s.value_pad + c] += h.packed_out[row * s.columns + n] + h.constants[row * kLanes];
    }
    if (h.rotated_out == nullptr) continue;
    rotate_back(h.rotated_out + q * s.value_pad, h.in.value_dim);
    for (int64_t c = 0; c < h.in.value_dim; c++)
      h.result->out[q * s.value_pad + c] += h.rotated_out[q * s.value_pad + c];
  }
}

}  // namespace specache

// Floats that codes are multiplied with become integers: `factor` = `step` * (an integer), rounded.
//
// An integer is one signed byte, or two: 256 * high + low. Each byte is a row of its own in `products`. `step` is chosen
// for a whole chunk of tokens, so that choosing it costs next to nothing. Codes count from the middle of their range, as
// far as rounding is concerned: sums with the middle code are taken of the floats, so rounding shifts nothing.
#pragma once

#include "head.h"
#include "code_products.h"

namespace specache {

// The largest factor as an integer.
constexpr float kLimit[3] = {0, 126, 127 * 256 + 127};

// 1 / x, or 0 where x is 0 or nearly.
inline float inverse_of(float x) { return x > 1e-36f ? 1.0f / x : 0.0f; }

// The sum of the four signed bytes of each word.
inline Ints sum_of_bytes(Ints words) {
  Sums all{};
  dot(all, splat(0x01010101), words);
  return total(all);
}

// The largest magnitude of a[i] * b[i]. n is a multiple of kLanes; b is not negative.
inline float largest_product(const float* a, const float* b, int64_t n) {
  Floats top{};
  for (int64_t i = 0; i < n; i += kLanes) top = larger(magnitude(load_floats(a + i)) * load_floats(b + i), top);
  return largest(top);
}

// One byte of each of four vectors of integers, side by side.
template <int SHIFT>
inline Ints packed_bytes(const Ints* x) {
  const Ints first = SHIFT == 0 ? x[0] : x[0] >> 8, second = SHIFT == 0 ? x[1] << 8 : x[1];
  const Ints third = SHIFT == 0 ? x[2] << 16 : x[2] << 8, fourth = SHIFT == 0 ? x[3] << 24 : x[3] << 16;
  return (first & 0xff) | (second & 0xff00) | (third & 0xff0000) | (fourth & static_cast<int>(0xff000000));
}

// With this added, bits 8 to 15 of a float are the next lower integer, modulo 256.
constexpr float kFloor = 49152.0f;

// Factors a * b, times `scale` where it is given, as integers to `to`: n of them, a multiple of 4 * kLanes, in words of four
// that are kLanes apart; the low bytes behind the n / 4 words of high ones. Returns their sum, by lanes. `also` += c * d.
// DITHER: one byte, rounded up or down by `dither`, which has kFloor in it.
template <int BYTES, bool DITHER, bool SCALE>
inline Ints round_factors(const float* a, const float* b, float scale, const float* dither, int64_t n, const float* c,
                          const float* d, Floats& also, int32_t* to) {
  // With half a high byte more, the high byte is the nearest one, and the low byte is off by its top bit.
  const Floats rounder = splat(BYTES == 1 ? kRounder : kRounder + 128);
  Ints integers{};
  for (int64_t i = 0; i < n; i += 4 * kLanes) {
    Ints x[4];
    for (int j = 0; j < 4; j++) {
      const int64_t at = i + j * kLanes;
      const Floats factor = SCALE ? load_floats(a + at) * scale : load_floats(a + at);
      x[j] = (Ints)(factor * load_floats(b + at) + (DITHER ? load_floats(dither + at) : rounder));
      also += load_floats(c + at) * load_floats(d + at);
    }
    const Ints high = packed_bytes<BYTES == 2 || DITHER ? 8 : 0>(x);
    store(to + i / 4, high);
    integers += sum_of_bytes(high) << (BYTES == 2 ? 8 : 0);
    if (BYTES == 1) continue;
    const Ints low = packed_bytes<0>(x) ^ static_cast<int>(0x80808080);
    store(to + n / 4 + i / 4, low);
    integers += sum_of_bytes(low);
  }
  return integers;
}

}  // namespace specache

// Floats that codes are multiplied with become integers: `factor` = `step` * (an integer) + what is lost.
//
// An integer is one signed byte, or two: 256 * high + low. Each byte is a row of its own in `products`. `step` is chosen
// for a whole chunk of tokens, so that choosing it costs next to nothing. What is lost is summed, and the caller gives
// it the mean code: rounding then shifts nothing.
#pragma once

#include "head.h"
#include "products.h"

namespace specache {

// The largest factor as an integer. One byte has room for 0.5 more, see `kDither`.
constexpr float kLimit[3] = {0, 126, 127 * 256 + 127};

// 1 / step, or 0 where all factors are 0 or nearly.
inline float inverse_of(float step) { return step > 1e-36f ? 1.0f / step : 0.0f; }

// The largest magnitude of a[i] * b[i]. n is a multiple of kLanes; b is not negative.
inline float largest_product(const float* a, const float* b, int64_t n) {
  Floats top{};
  for (int64_t i = 0; i < n; i += kLanes) top = larger(magnitude(load_floats(a + i)) * load_floats(b + i), top);
  return largest(top);
}

// One byte of each of four vectors of integers, side by side.
template <int SHIFT>
inline Ints bytes_of(const Ints* x) {
  const Ints first = SHIFT == 0 ? x[0] : x[0] >> 8, second = SHIFT == 0 ? x[1] << 8 : x[1];
  const Ints third = SHIFT == 0 ? x[2] << 16 : x[2] << 8, fourth = SHIFT == 0 ? x[3] << 24 : x[3] << 16;
  return (first & 0xff) | (second & 0xff00) | (third & 0xff0000) | (fourth & static_cast<int>(0xff000000));
}

// Factors a * b * inverse, n of them, a multiple of 4 * kLanes, to `to` in words of four that are kLanes apart; the low
// bytes behind the n / 4 words of high ones. Returns what is lost, in steps, summed by lanes.
// `dither`: null, or what is added before rounding. `sum` += c * d on the way.
template <int BYTES>
inline Floats round_factors(const float* a, const float* b, float inverse, int64_t n, const float* dither,
                            const float* c, const float* d, Floats& sum, int32_t* to) {
  // With half a high byte more, the high byte is the nearest one, and the low byte is off by its top bit.
  const float rounder = BYTES == 1 ? kRounder : kRounder + 128;
  Floats lost{};
  for (int64_t i = 0; i < n; i += 4 * kLanes) {
    Ints x[4];
    for (int j = 0; j < 4; j++) {
      const int64_t at = i + j * kLanes;
      const Floats factor = load_floats(a + at) * load_floats(b + at) * inverse;
      const Floats raised = (dither == nullptr ? factor : factor + load_floats(dither + at)) + rounder;
      lost += factor - (raised - rounder);
      sum += load_floats(c + at) * load_floats(d + at);
      x[j] = (Ints)raised;
    }
    store(to + i / 4, bytes_of<BYTES == 1 ? 0 : 8>(x));
    if (BYTES == 2) store(to + n / 4 + i / 4, bytes_of<0>(x) ^ static_cast<int>(0x80808080));
  }
  return lost;
}

}  // namespace specache

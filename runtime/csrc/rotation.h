// The rotation of `TurboQuantizer`'s codes: `hadamard.rotate` of runtime/quant/hadamard.py. It is orthogonal up to a power
// of two, which is taken here on the side of the queries: products of rotated queries with rotated keys are those of both
// before, and rotated values come back.
#pragma once

#include "vec.h"

namespace specache {

// Channels that are rotated together: the largest power of two that divides n.
inline int64_t block_of(int64_t n) { return n & -n; }

// Rudin's and Shapiro's signs, which keep equal numbers from piling up.
inline float sign_of(int64_t channel, int64_t block) {
  channel %= block;
  return __builtin_parityll(channel & (channel >> 1)) ? -1.0f : 1.0f;
}

// Times Sylvester's matrix: n channels, each of `width` numbers side by side.
inline void transform(float* x, int64_t n, int64_t width) {
  const int64_t block = block_of(n);
  for (int64_t apart = width; apart < block * width; apart *= 2)
    for (int64_t c = 0; c < n * width; c += 2 * apart) {
      float *low = x + c, *high = low + apart;
      for (int64_t i = 0; i < apart; i++) {
        const float first = low[i], second = high[i];
        low[i] = first + second;
        high[i] = first - second;
      }
    }
}

inline void flip(float* x, int64_t n) {
  const int64_t block = block_of(n);
  for (int64_t i = 0; i < n; i++) x[i] *= sign_of(i, block);
}

inline void rotate(float* query, int64_t n) {
  flip(query, n);
  transform(query, n, 1);
}

inline void rotate_back(float* out, int64_t n) {
  transform(out, n, 1);
  flip(out, n);
}

}  // namespace specache

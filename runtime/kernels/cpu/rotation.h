// The rotation of `TurboQuantizer`'s codes: `hadamard.rotate` of runtime/quant/hadamard.py. It is orthogonal up to a power
// of two, which is taken here on the side of the queries: products of rotated queries with rotated keys are those of both
// before, and rotated values come back.
#pragma once

#include "vec.h"

namespace specache {

// Times Sylvester's matrix, in blocks of the largest power of two that divides n.
inline void transform(float* x, int64_t n) {
  const int64_t block = n & -n;
  for (int64_t size = 1; size < block; size *= 2)
    for (int64_t i = 0; i < n; i += 2 * size)
      for (int64_t j = i; j < i + size; j++) {
        const float first = x[j], second = x[j + size];
        x[j] = first + second;
        x[j + size] = first - second;
      }
}

// Rudin's and Shapiro's signs, which keep equal numbers from piling up.
inline void flip(float* x, int64_t n) {
  const int64_t block = n & -n;
  for (int64_t i = 0; i < n; i++) {
    const int64_t channel = i % block;
    if (__builtin_parityll(channel & (channel >> 1))) x[i] = -x[i];
  }
}

inline void rotate(float* query, int64_t n) {
  flip(query, n);
  transform(query, n);
}

inline void rotate_back(float* out, int64_t n) {
  transform(out, n);
  flip(out, n);
}

}  // namespace specache

// Vectors of the instruction set's width, by the compilers' vector extension, and float functions over them.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(SPECACHE_AVX512)
#define SPECACHE_LANES 16
#define SPECACHE_ISA "isa_avx512.h"
#elif defined(SPECACHE_AVX2)
#define SPECACHE_LANES 8
#define SPECACHE_ISA "isa_avx2.h"
#else
#define SPECACHE_LANES 4
#define SPECACHE_ISA "isa_portable.h"
#endif

namespace specache {

constexpr int kLanes = SPECACHE_LANES;  // 32-bit lanes of a vector

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));

// Where words go that are made of the i-th 16 bytes of rows which lie one behind the other.
template <int ROW_BYTES>
constexpr int64_t offset_of_16(int64_t i, int64_t width) {
  return 16 * i / ROW_BYTES * width + 16 * i % ROW_BYTES;
}

}  // namespace specache

#include SPECACHE_ISA  // needs the above

namespace specache {

constexpr float kInfinity = __builtin_inff();
constexpr int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

template <class V>
inline V load(const void* from) {
  V v;
  memcpy(&v, from, sizeof(V));
  return v;
}

template <class V>
inline void store(void* to, V v) {
  memcpy(to, &v, sizeof(V));
}

inline Floats load_floats(const float* from) { return load<Floats>(from); }
inline Floats splat(float x) { return x - Floats{}; }
inline Ints splat(int32_t x) { return x - Ints{}; }
inline Floats to_floats(Ints x) { return __builtin_convertvector(x, Floats); }
inline Floats magnitude(Floats x) { return (Floats)((Ints)x & 0x7fffffff); }

// Adding 1.5 * 2^23 leaves the nearest integer in the lowest bits of the sum. |x| < 2^22.
constexpr float kRounder = 12582912.0f;

// e^x within 2 ulp and 2^-24 of x; 0 below -87 (also for -inf), NaN for NaN. x <= 88. As 2^n times 2^f, f within a half.
inline Floats exponential(Floats x) {
  const Floats y = x * 1.44269504f, rounded = y + kRounder, f = y - (rounded - kRounder);
  Floats z = f * 1.3276470e-3f + 9.6755405e-3f;
  z = z * f + 5.5507131e-2f;
  z = z * f + 2.4022120e-1f;
  z = z * f + 6.9314694e-1f;
  z = z * f + 1.0000001f;
  const Floats power = (Floats)(((Ints)rounded + 127) << 23);
  return x < -87.0f ? Floats{} : z * power;
}

inline float exponential(float x) { return exponential(splat(x))[0]; }

// cap * tanh(x / cap) within 3 ulp, for a cap above 0. tanh(y) is g / (g + 2) where g = e^2y - 1. With 2^n times 2^f for
// e^2y, g is 2^n (2^f - 1) + (2^n - 1): nothing cancels, however small y is.
inline Floats capped(Floats x, float cap) {
  const float most = 3.4028235e38f, factor = 2 * 1.44269504f / cap;
  Floats y = magnitude(x) * (factor < most ? factor : most);
  y = y > 60.0f ? splat(60.0f) : y;
  const Floats rounded = y + kRounder, f = y - (rounded - kRounder);
  Floats z = f * 1.5403512e-4f + 1.3390735e-3f;
  z = z * f + 9.6182376e-3f;
  z = z * f + 5.5503573e-2f;
  z = z * f + 2.4022649e-1f;
  z = z * f + 6.9314718e-1f;
  const Floats power = (Floats)(((Ints)rounded + 127) << 23), grown = z * f * power + (power - 1.0f);
  const Floats size = grown / (grown + 2.0f) * cap;
  return x < 0.0f ? -size : size;
}

enum Dtype : int64_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

inline int64_t bytes_of(int64_t dtype) { return dtype == kFloat32 ? 4 : 2; }

// Asks for so many bytes.
inline void prefetch(const void* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(from) + i);
}

inline const void* row_of(const void* data, int64_t elements, int64_t dtype) {
  return static_cast<const char*>(data) + elements * bytes_of(dtype);
}

inline float bits_to_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

inline uint32_t float_to_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

inline float half_to_float(uint16_t half) {
  const uint32_t rest = (half & 0x7fffu) << 13;
  // Exponents are 112 apart. A subnormal number counts steps above 2^-14, which is subtracted again: no float is subnormal
  // on the way, which a processor that flushes those would lose.
  uint32_t bits = rest + (112u << 23);
  const uint32_t subnormal = float_to_bits(bits_to_float(rest + (113u << 23)) - 6.103515625e-5f);
  bits = rest >= 0x0f800000u ? rest | 0x7f800000u : rest < 0x00800000u ? subnormal : bits;
  return bits_to_float(bits | (half & 0x8000u) << 16);
}

inline uint16_t float_to_half(float x) {
  const uint32_t bits = float_to_bits(x), sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
  if (size > 0x7f800000u) return sign | 0x7e00u;
  if (size >= 0x477ff000u) return sign | 0x7c00u;  // rounds to more than the largest
  if (size < 0x38800000u) {
    // Adding 0.5 leaves a subnormal half in the lowest bits, rounded to nearest even by the sum.
    return sign | (float_to_bits(bits_to_float(size) + 0.5f) - 0x3f000000u);
  }
  return sign | ((size + 0xfffu + (size >> 13 & 1) - 0x38000000u) >> 13);
}

inline uint16_t float_to_bfloat(float x) {
  const uint32_t bits = float_to_bits(x);
  return x != x ? 0x7fc0u : (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
}

typedef uint16_t HalfVector __attribute__((vector_size(2 * kLanes)));

// n elements of a tensor as float32.
inline void to_float(float* to, const void* from, int64_t n, int64_t dtype) {
  const uint16_t* halves = static_cast<const uint16_t*>(from);
  if (dtype == kFloat32) {
    memcpy(to, from, 4 * n);
  } else if (dtype == kBFloat16) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes)
      store(to + i, __builtin_convertvector(load<HalfVector>(halves + i), Ints) << 16);
    for (; i < n; i++) to[i] = bits_to_float(uint32_t{halves[i]} << 16);
  } else {
    for (int64_t i = 0; i < n; i++) to[i] = half_to_float(halves[i]);  // compilers vectorise this
  }
}

inline void from_float(void* to, int64_t at, float x, int64_t dtype) {
  if (dtype == kFloat32) {
    static_cast<float*>(to)[at] = x;
  } else {
    static_cast<uint16_t*>(to)[at] = dtype == kBFloat16 ? float_to_bfloat(x) : float_to_half(x);
  }
}

}  // namespace specache

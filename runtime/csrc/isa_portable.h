// Integer products for any machine: vectors of 16 bytes, which the compiler maps to what there is (SSE2, NEON).
#pragma once

namespace specache {

constexpr int kTileRows = 4;  // rows of sums that registers have room for, two vectors each

typedef int16_t Shorts __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(4 * kLanes)));
typedef Shorts Sums;

// Products of a code up to `max_code` and a factor in [-128, 127] that a 16-bit lane of `Sums` holds for sure.
constexpr int64_t safe_steps(int max_code) { return 32767 / (2 * 128 * max_code); }

// sums += codes x factors: four unsigned bytes times four signed ones in every 32-bit lane.
inline void dot(Sums& sums, Ints codes, Ints factors) {
  const Shorts low = (Shorts)codes & 0xff, high = (Shorts)((Halves)codes >> 8);
  sums += low * ((Shorts)((Halves)factors << 8) >> 8) + high * ((Shorts)factors >> 8);
}

inline Ints total(Sums sums) {
  const Ints pairs = (Ints)sums;
  return ((Ints)(pairs << 16) >> 16) + (pairs >> 16);
}

// A lane for each of kLanes signed bytes.
inline Ints load_bytes(const int8_t* from) { return Ints{from[0], from[1], from[2], from[3]}; }

inline float sum(Floats v) { return (v[0] + v[1]) + (v[2] + v[3]); }
inline float largest(Floats v) {
  const float a = v[0] > v[1] ? v[0] : v[1], b = v[2] > v[3] ? v[2] : v[3];
  return a > b ? a : b;
}

typedef uint8_t Bytes __attribute__((vector_size(16)));
typedef uint64_t Longs __attribute__((vector_size(16)));

#if defined(__clang__) || __GNUC__ >= 12
#define SPECACHE_SHUFFLE(V, a, b, ...) (Ints) __builtin_shufflevector((V)(a), (V)(b), __VA_ARGS__)
#else
#define SPECACHE_SHUFFLE(V, a, b, ...) (Ints) __builtin_shuffle((V)(a), (V)(b), V{__VA_ARGS__})
#endif

// The first halves of a and b interleaved, then the second ones.
inline Ints low_bytes(Ints a, Ints b) {
  return SPECACHE_SHUFFLE(Bytes, a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
inline Ints high_bytes(Ints a, Ints b) {
  return SPECACHE_SHUFFLE(Bytes, a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}
inline Ints low_halves(Ints a, Ints b) { return SPECACHE_SHUFFLE(Halves, a, b, 0, 8, 1, 9, 2, 10, 3, 11); }
inline Ints high_halves(Ints a, Ints b) { return SPECACHE_SHUFFLE(Halves, a, b, 4, 12, 5, 13, 6, 14, 7, 15); }
inline Ints low_words(Ints a, Ints b) { return SPECACHE_SHUFFLE(Ints, a, b, 0, 4, 1, 5); }
inline Ints high_words(Ints a, Ints b) { return SPECACHE_SHUFFLE(Ints, a, b, 2, 6, 3, 7); }
inline Ints low_longs(Ints a, Ints b) { return SPECACHE_SHUFFLE(Longs, a, b, 0, 2); }
inline Ints high_longs(Ints a, Ints b) { return SPECACHE_SHUFFLE(Longs, a, b, 1, 3); }

// 16 bytes of a row.
inline Ints rows_of_16(const uint8_t* row, int64_t) {
  Ints x;
  memcpy(&x, row, 16);
  return x;
}

// The i-th 16 bytes of each of four vectors, side by side, to where words of the i-th 16 bytes of rows belong.
template <int ROW_BYTES>
inline void store_by_16(const Ints* x, int32_t* to, int64_t) { memcpy(to, x, 64); }

// The first half, or quarter, of a vector's words, to every one of it.
inline Ints load_halves(const int32_t* from) { return Ints{from[0], from[1], from[0], from[1]}; }
inline Ints load_quarters(const int32_t* from) { return Ints{from[0], from[0], from[0], from[0]}; }

// The larger of two in each lane; b where a is NaN.
inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

}  // namespace specache

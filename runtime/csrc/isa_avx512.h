// Integer products with AVX-512 VNNI: 64 of 8 bits at a time, summed in fours to 32 bits.
#pragma once

#include <immintrin.h>

namespace specache {

constexpr int kTileRows = 8;  // rows of sums that registers have room for, two vectors each

typedef __m512i Sums;

// Sums are of 32 bits: no number of steps that a head can have overflows them.
constexpr int64_t safe_steps(int) { return 1 << 16; }

// sums += codes x factors: four unsigned bytes times four signed ones in every 32-bit lane. In assembly, for GCC moves
// every sum to another register and back with the intrinsic.
inline void dot(Sums& sums, Ints codes, Ints factors) {
  Sums all = sums;
  asm("vpdpbusd %2, %1, %0" : "+v"(all) : "v"(codes), "v"(factors));
  sums = all;
}

inline Ints total(Sums sums) { return (Ints)sums; }

// A lane for each of kLanes signed bytes.
inline Ints load_bytes(const int8_t* from) {
  return (Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

inline float sum(Floats v) { return _mm512_reduce_add_ps(v); }
inline float largest(Floats v) { return _mm512_reduce_max_ps(v); }

// Within each 16 bytes: the first halves of a and b interleaved, then the second ones.
inline Ints low_bytes(Ints a, Ints b) { return (Ints)_mm512_unpacklo_epi8((__m512i)a, (__m512i)b); }
inline Ints high_bytes(Ints a, Ints b) { return (Ints)_mm512_unpackhi_epi8((__m512i)a, (__m512i)b); }
inline Ints low_halves(Ints a, Ints b) { return (Ints)_mm512_unpacklo_epi16((__m512i)a, (__m512i)b); }
inline Ints high_halves(Ints a, Ints b) { return (Ints)_mm512_unpackhi_epi16((__m512i)a, (__m512i)b); }
inline Ints low_words(Ints a, Ints b) { return (Ints)_mm512_unpacklo_epi32((__m512i)a, (__m512i)b); }
inline Ints high_words(Ints a, Ints b) { return (Ints)_mm512_unpackhi_epi32((__m512i)a, (__m512i)b); }
inline Ints low_longs(Ints a, Ints b) { return (Ints)_mm512_unpacklo_epi64((__m512i)a, (__m512i)b); }
inline Ints high_longs(Ints a, Ints b) { return (Ints)_mm512_unpackhi_epi64((__m512i)a, (__m512i)b); }

// 16 bytes from each of four rows.
inline Ints rows_of_16(const uint8_t* row, int64_t stride) {
  __m512i x = _mm512_castsi128_si512(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row)));
  x = _mm512_inserti32x4(x, _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + stride)), 1);
  x = _mm512_inserti32x4(x, _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + 2 * stride)), 2);
  return (Ints)_mm512_inserti32x4(x, _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + 3 * stride)), 3);
}

// The i-th 16 bytes of each of four vectors, side by side, to where words of the i-th 16 bytes of rows belong.
template <int ROW_BYTES>
inline void store_by_16(const Ints* x, int32_t* to, int64_t width) {
  const __m512i a = _mm512_shuffle_i32x4((__m512i)x[0], (__m512i)x[1], 0x44);
  const __m512i b = _mm512_shuffle_i32x4((__m512i)x[2], (__m512i)x[3], 0x44);
  const __m512i c = _mm512_shuffle_i32x4((__m512i)x[0], (__m512i)x[1], 0xee);
  const __m512i d = _mm512_shuffle_i32x4((__m512i)x[2], (__m512i)x[3], 0xee);
  _mm512_storeu_si512(to + offset_of_16<ROW_BYTES>(0, width), _mm512_shuffle_i32x4(a, b, 0x88));
  _mm512_storeu_si512(to + offset_of_16<ROW_BYTES>(1, width), _mm512_shuffle_i32x4(a, b, 0xdd));
  _mm512_storeu_si512(to + offset_of_16<ROW_BYTES>(2, width), _mm512_shuffle_i32x4(c, d, 0x88));
  _mm512_storeu_si512(to + offset_of_16<ROW_BYTES>(3, width), _mm512_shuffle_i32x4(c, d, 0xdd));
}

// The first half, or quarter, of a vector's words, to every one of it.
inline Ints load_halves(const int32_t* from) {
  return (Ints)_mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
inline Ints load_quarters(const int32_t* from) {
  return (Ints)_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

// The larger of two in each lane; b where a is NaN.
inline Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }

}  // namespace specache

// Integer products with AVX2: 32 of 8 bits at a time, summed in pairs to 16 bits.
#pragma once

#include <immintrin.h>

namespace specache {

constexpr int kTileRows = 4;  // rows of sums that registers have room for, two vectors each

typedef __m256i Sums;

// Products of a code up to `max_code` and a factor in [-128, 127] that a 16-bit lane of `Sums` holds for sure.
constexpr int64_t safe_steps(int max_code) { return 32767 / (2 * 128 * max_code); }

// sums += codes x factors: four unsigned bytes times four signed ones in every 32-bit lane.
inline void dot(Sums& sums, Ints codes, Ints factors) {
  sums = _mm256_add_epi16(sums, _mm256_maddubs_epi16((__m256i)codes, (__m256i)factors));
}

inline Ints total(Sums sums) { return (Ints)_mm256_madd_epi16(sums, _mm256_set1_epi16(1)); }

// A lane for each of kLanes signed bytes.
inline Ints load_bytes(const int8_t* from) {
  return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
}

inline float sum(Floats v) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float largest(Floats v) {
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

// Within each 16 bytes: the first halves of a and b interleaved, then the second ones.
inline Ints low_bytes(Ints a, Ints b) { return (Ints)_mm256_unpacklo_epi8((__m256i)a, (__m256i)b); }
inline Ints high_bytes(Ints a, Ints b) { return (Ints)_mm256_unpackhi_epi8((__m256i)a, (__m256i)b); }
inline Ints low_halves(Ints a, Ints b) { return (Ints)_mm256_unpacklo_epi16((__m256i)a, (__m256i)b); }
inline Ints high_halves(Ints a, Ints b) { return (Ints)_mm256_unpackhi_epi16((__m256i)a, (__m256i)b); }
inline Ints low_words(Ints a, Ints b) { return (Ints)_mm256_unpacklo_epi32((__m256i)a, (__m256i)b); }
inline Ints high_words(Ints a, Ints b) { return (Ints)_mm256_unpackhi_epi32((__m256i)a, (__m256i)b); }
inline Ints low_longs(Ints a, Ints b) { return (Ints)_mm256_unpacklo_epi64((__m256i)a, (__m256i)b); }
inline Ints high_longs(Ints a, Ints b) { return (Ints)_mm256_unpackhi_epi64((__m256i)a, (__m256i)b); }

// 16 bytes from each of two rows.
inline Ints rows_of_16(const uint8_t* row, int64_t stride) {
  const __m128i first = _mm_loadu_si128(reinterpret_cast<const __m128i*>(row));
  const __m128i second = _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + stride));
  return (Ints)_mm256_inserti128_si256(_mm256_castsi128_si256(first), second, 1);
}

// The i-th 16 bytes of each of four vectors, side by side, to where words of the i-th 16 bytes of rows belong.
template <int ROW_BYTES>
inline void store_by_16(const Ints* x, int32_t* to, int64_t width) {
  for (int j = 0; j < 2; j++) {
    const __m256i a = (__m256i)x[2 * j], b = (__m256i)x[2 * j + 1];
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 8 * j), _mm256_permute2x128_si256(a, b, 0x20));
    int32_t* second = to + offset_of_16<ROW_BYTES>(1, width) + 8 * j;
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(second), _mm256_permute2x128_si256(a, b, 0x31));
  }
}

// The first half, or quarter, of a vector's words, to every one of it.
inline Ints load_halves(const int32_t* from) {
  return (Ints)_mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline Ints load_quarters(const int32_t* from) {
  return (Ints)_mm256_broadcastq_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
}

// The larger of two in each lane; b where a is NaN.
inline Floats larger(Floats a, Floats b) { return _mm256_max_ps(a, b); }

}  // namespace specache

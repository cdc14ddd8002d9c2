// Products in bfloat16 by AMX: 16 rows of the weight, as they lie, times up to 16 rows, 32 elements of each at once.
#pragma once

#if defined(__AMX_BF16__) && defined(__linux__)
#define SPECACHE_TILES

#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <memory>

#include "vec.h"

namespace specache {

class Tiles {
 public:
  static constexpr int64_t kOuts = 32;  // of a weight at once: two tiles, for each of `rows`

  // Whether this process may use them, for products of so many elements.
  static bool serve(int64_t in) {
    static const bool usable = has_tiles() && syscall(SYS_arch_prctl, kAskFor, kTileData) == 0;
    return usable && in % kDepth == 0;
  }

  // Lays rows `[num_rows][in]`, 32 at most, out as tiles: a pair of elements of each row, then the next pair.
  Tiles(const uint16_t* rows, int64_t num_rows, int64_t in)
      : in_(in), num_rows_(num_rows), pairs_(new uint32_t[num_rows * in / 2]) {
    for (int64_t first = 0; first < num_rows; first += kSide) {
      const int64_t count = width(first);
      uint32_t* to = pairs_.get() + first * in / 2;
      const __mmask16 some = (1u << count) - 1;
      const __m512i from = _mm512_mullo_epi32(lanes(), _mm512_set1_epi32(static_cast<int>(in / 2)));
      for (int64_t c = 0; c < in; c += 2, to += count)
        _mm512_mask_storeu_epi32(to, some, _mm512_mask_i32gather_epi32(__m512i(), some, from, rows + first * in + c, 4));
    }
  }

  // Outputs `first` to `end` of a weight `[outs][in]`, to `[num_rows][outs]`.
  void multiply(const uint16_t* weight, int64_t outs, int64_t first, int64_t end, uint16_t* to) const {
    const bool wide = num_rows_ > kSide;
    for (int64_t out = first; out < end; out += kOuts) {
      const int64_t left = end - out;
      if (out == first || left < kOuts)
        configure(left < kSide ? left : kSide, left < kSide ? 0 : left < kOuts ? left - kSide : kSide);
      float sums[4][kSide * kSide];
      const uint16_t* from = weight + out * in_;
      if (left > kSide)
        wide ? add<true, true>(from, sums) : add<true, false>(from, sums);
      else
        wide ? add<false, true>(from, sums) : add<false, false>(from, sums);
      const int64_t count = left < kOuts ? left : kOuts;
      const __m512i column = _mm512_slli_epi32(lanes(), 4);
      for (int64_t r = 0; r < num_rows_; r++)
        for (int64_t o = 0; o < count; o += kSide) {
          const __mmask16 some = count - o < kSide ? (1u << (count - o)) - 1 : 0xffff;
          const float* tile = sums[o / kSide * 2 + r / kSide] + r % kSide;
          const __m512 row = _mm512_mask_i32gather_ps(__m512(), some, column, tile, 4);
          _mm256_mask_storeu_epi16(to + r * outs + out + o, some, (__m256i)_mm512_cvtneps_pbh(row));
        }
    }
    _tile_release();
  }

 private:
  static constexpr int64_t kSide = 16, kDepth = 32;
  static constexpr long kAskFor = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA

  static bool has_tiles() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    constexpr unsigned kBfloat16 = 1u << 22, kTile = 1u << 24;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kBfloat16) && (d & kTile);
  }

  static __m512i lanes() { return _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0); }

  int64_t width(int64_t first) const { return num_rows_ - first < kSide ? num_rows_ - first : kSide; }

  // Tiles 0 to 3 are sums, by outputs and rows; 4 and 5 are of the weight, 6 and 7 of rows.
  void configure(int64_t outs, int64_t more_outs) const {
    struct {
      uint8_t palette = 1, start = 0, none[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } c;
    const int64_t out[] = {outs, more_outs}, rows[] = {width(0), num_rows_ > kSide ? width(kSide) : 0};
    for (int i = 0; i < 4; i++) {
      if (out[i / 2] == 0 || rows[i % 2] == 0) continue;
      c.rows[i] = out[i / 2];
      c.bytes[i] = 4 * rows[i % 2];
    }
    for (int i = 0; i < 2; i++) {
      c.rows[4 + i] = out[i];
      c.bytes[4 + i] = out[i] == 0 ? 0 : 2 * kDepth;
      c.rows[6 + i] = rows[i] == 0 ? 0 : kDepth / 2;
      c.bytes[6 + i] = 4 * rows[i];
    }
    _tile_loadconfig(&c);
  }

  // TALL: there are more than 16 outputs. WIDE: there are more than 16 rows.
  template <bool TALL, bool WIDE>
  void add(const uint16_t* weight, float (&sums)[4][kSide * kSide]) const {
    const int64_t row_bytes = 2 * in_, near = 4 * width(0), far = WIDE ? 4 * width(kSide) : 0;
    const char* from = reinterpret_cast<const char*>(pairs_.get());
    const char* others = from + kSide * row_bytes;
    _tile_zero(0);
    if (WIDE) _tile_zero(1);
    if (TALL) _tile_zero(2);
    if (TALL && WIDE) _tile_zero(3);
    for (int64_t c = 0; c < in_; c += kDepth) {
      _tile_loadd(6, from + c / 2 * near, near);
      if (WIDE) _tile_loadd(7, others + c / 2 * far, far);
      _tile_loadd(4, weight + c, row_bytes);
      _tile_dpbf16ps(0, 4, 6);
      if (WIDE) _tile_dpbf16ps(1, 4, 7);
      if (TALL) {
        _tile_loadd(5, weight + kSide * in_ + c, row_bytes);
        _tile_dpbf16ps(2, 5, 6);
        if (WIDE) _tile_dpbf16ps(3, 5, 7);
      }
    }
    constexpr int64_t kStride = 4 * kSide;
    _tile_stored(0, sums[0], kStride);
    if (WIDE) _tile_stored(1, sums[1], kStride);
    if (TALL) _tile_stored(2, sums[2], kStride);
    if (TALL && WIDE) _tile_stored(3, sums[3], kStride);
  }

  const int64_t in_, num_rows_;
  const std::unique_ptr<uint32_t[]> pairs_;
};

}  // namespace specache
#endif

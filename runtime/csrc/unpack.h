// Packed codes to words of four bytes in the order in which `products` reads them.
#pragma once

#include "vec.h"

namespace specache {

// How codes of so many bits are read. 8-bit codes are two digits of 4 bits: a product with 8 bits would overflow.
template <int BITS>
struct Format {
  static constexpr int kPerByte = 8 / BITS;                // channels in a packed byte
  static constexpr int kDigits = BITS == 8 ? 2 : 1;
  static constexpr int kFieldBits = BITS / kDigits;
  static constexpr int kMaxField = (1 << kFieldBits) - 1;
  static constexpr int kMaxCode = (1 << BITS) - 1;
};

// Up to 4 * kLanes rows of 16 bytes, `stride` apart: where they are, or, near the end, a copy with zeros behind each row.
struct Rows {
  inline void read(const uint8_t* codes, int64_t row_bytes, int64_t tokens, int64_t at, int64_t count) {
    const int64_t left = row_bytes - at < 16 ? row_bytes - at : 16;
    first = codes + at;
    stride = row_bytes;
    if (left == 16 && count <= tokens) return;
    for (int64_t i = 0; i < count; i++) {
      memset(copy[i], 0, 16);
      if (i < tokens) memcpy(copy[i], first + i * row_bytes, left);
    }
    first = copy[0];
    stride = 16;
  }
  const uint8_t* first;
  int64_t stride;
  uint8_t copy[4 * kLanes][16];
};

// Keys: `words[w][t]` = bytes 4w to 4w + 3 of token t. A transposition of 4 x 4 words at a time.
inline void words_by_channel(const uint8_t* codes, int64_t row_bytes, int64_t tokens, int32_t* words, int64_t width) {
  Rows rows;
  for (int64_t t = 0; t < tokens; t += kLanes) {
    for (int64_t at = 0; at < row_bytes; at += 16) {
      rows.read(codes + t * row_bytes, row_bytes, tokens - t, at, kLanes);
      Ints x[4];
      for (int i = 0; i < 4; i++) x[i] = rows_of_16(rows.first + i * rows.stride, 4 * rows.stride);
      const Ints ab = low_words(x[0], x[1]), cd = low_words(x[2], x[3]);
      const Ints ef = high_words(x[0], x[1]), gh = high_words(x[2], x[3]);
      int32_t* to = words + at / 4 * width + t;
      store(to, low_longs(ab, cd));
      store(to + width, high_longs(ab, cd));
      store(to + 2 * width, low_longs(ef, gh));
      store(to + 3 * width, high_longs(ef, gh));
    }
  }
}

// In each 16 bytes: x[j] becomes the words of byte 4 * j to 4 * j + 3 of all four.
inline void bytes_side_by_side(Ints* x) {
  const Ints ab = low_bytes(x[0], x[1]), cd = low_bytes(x[2], x[3]);
  const Ints ef = high_bytes(x[0], x[1]), gh = high_bytes(x[2], x[3]);
  x[0] = low_halves(ab, cd);
  x[1] = high_halves(ab, cd);
  x[2] = low_halves(ef, gh);
  x[3] = high_halves(ef, gh);
}

// `words_by_token` of whole blocks, where vectors hold whole rows: each is read in one piece.
template <int ROW_BYTES>
inline void words_of_rows(const uint8_t* codes, int64_t tokens, int32_t* words, int64_t width) {
  constexpr int per_vector = 4 * kLanes / ROW_BYTES;
  for (int64_t t = 0; t < tokens; t += 4 * kLanes) {
    for (int64_t step = 0; step < kLanes; step += per_vector) {
      Ints x[4];
      for (int i = 0; i < 4; i++) x[i] = load<Ints>(codes + (t + step + i * kLanes) * ROW_BYTES);
      bytes_side_by_side(x);
      store_by_16<ROW_BYTES>(x, words + (t / 4 + step) * width, width);
    }
  }
}

// Values: `words[step][byte]` = that byte of four tokens that are kLanes apart, the first being `step`'s of its block of
// 4 * kLanes tokens: probabilities become words of factors in this order without any shuffling.
inline void words_by_token(const uint8_t* codes, int64_t row_bytes, int64_t tokens, int32_t* words, int64_t width) {
  if (tokens % (4 * kLanes) == 0) {
    if (row_bytes == 16) return words_of_rows<16>(codes, tokens, words, width);
    if (row_bytes == 32 && kLanes >= 8) return words_of_rows<kLanes >= 8 ? 32 : 16>(codes, tokens, words, width);
    if (row_bytes == 64 && kLanes >= 16) return words_of_rows<kLanes >= 16 ? 64 : 16>(codes, tokens, words, width);
  }
  Rows rows;
  for (int64_t t = 0; t < tokens; t += 4 * kLanes) {
    for (int64_t at = 0; at < row_bytes; at += 16) {
      rows.read(codes + t * row_bytes, row_bytes, tokens - t, at, 4 * kLanes);
      for (int64_t step = 0; step < kLanes; step += kLanes / 4) {
        Ints x[4];
        for (int i = 0; i < 4; i++) x[i] = rows_of_16(rows.first + (step + i * kLanes) * rows.stride, rows.stride);
        bytes_side_by_side(x);
        store_by_16<16>(x, words + (t / 4 + step) * width + at, width);
      }
    }
  }
}

// Values by channel in the order in which factors are read: step `w * kPerByte + place` has one channel of each byte of
// word w, and factors of a step are kLanes apart.
template <int BITS>
inline void packed_order(const float* channels, int64_t steps, float* to) {
  constexpr int P = Format<BITS>::kPerByte, N = P < kLanes ? P : kLanes;
  for (int64_t step = 0; step < steps; step += N)
    for (int i = 0; i < 4; i++)
      memcpy(to + (step / kLanes * 4 + i) * kLanes + step % kLanes, channels + (step / P * 4 + i) * P + step % P, 4 * N);
}

}  // namespace specache

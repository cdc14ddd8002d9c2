// sums[row][n] = codes . factors[row]: the one loop in which almost all of the time goes by.
//
// Codes are bytes, four to a 32-bit word; factors are signed bytes, four to a word, `factors[row][step]`. For keys a word
// holds four channels of token n, and each place in the bytes is a step of its own; for values four tokens of one byte
// of channels, and the places are n. Rows are the queries that read these codes: each word is loaded, and its fields
// are taken from it, once for all of them.
#pragma once

#include "unpack.h"

namespace specache {

// `words[row][width]`. Keys: n goes from 0 to `columns`. Values: through `columns` bytes for each place in them.
struct Codes {
  const int32_t* words;
  int64_t width, rows, columns;
};

// What is asked for from memory in the meantime: it comes at its own pace, and a stretch at once would be waited for.
struct Ahead {
  const uint8_t* at;
  int64_t step;  // bytes
};

// Bytes of codes between what is read and what is asked for. Half or twice as many are as good.
constexpr int64_t kAhead = 8192;

// One vector of n: where its words are, and by how much they are shifted.
struct Place {
  int64_t column;
  int32_t shift;
};

// Groups of values may have fewer bytes than a vector lanes: words are then loaded to each 1/COPIES of it, for as many
// places in their bytes at a time.
template <int BITS, int COPIES>
inline Ints place_shifts(int32_t shift) {
  Ints shifts = splat(shift);
  for (int i = 0; i < kLanes; i++) shifts[i] += i / (kLanes / COPIES) * BITS;
  return shifts;
}

template <int COPIES>
inline Ints load_copies(const int32_t* from) {
  return COPIES == 1 ? load<Ints>(from) : COPIES == 2 ? load_halves(from) : load_quarters(from);
}

template <int BITS, int PLACES, int COPIES, int ROWS, int VECS>
inline void tile(const Codes& codes, int64_t first, int64_t count, const Place* at, const int32_t* factors,
                 int64_t factor_width, int32_t* sums, int64_t width, bool add, Ahead& ahead) {
  using F = Format<BITS>;
  const uint8_t* asked = ahead.at;
  Sums acc[ROWS][VECS];
  Ints shift[VECS];
  const int32_t* from[VECS];
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < VECS; v++) acc[r][v] = Sums{};
  for (int v = 0; v < VECS; v++) {
    shift[v] = place_shifts<BITS, COPIES>(at[v].shift);
    from[v] = codes.words + first * codes.width + at[v].column;
  }
  const int32_t* factor = factors + first * PLACES;
  int64_t row = 0;
  do {  // there is at least one: said so, the compiler needs no copies of the sums for none
    Ints word[VECS];
    for (int v = 0; v < VECS; v++) {
      word[v] = load_copies<COPIES>(from[v] + row * codes.width);
      if (PLACES == 1) word[v] = word[v] >> shift[v];
    }
    for (int place = 0; place < PLACES; place++, factor++) {
      Ints code[VECS];
      __builtin_prefetch(asked);
      asked += ahead.step;
      for (int v = 0; v < VECS; v++) {
        code[v] = word[v] & (0x01010101 * F::kMaxField);
        word[v] = word[v] >> F::kFieldBits;
      }
      for (int r = 0; r < ROWS; r++) {
        const Ints each = splat(factor[r * factor_width]);
        for (int v = 0; v < VECS; v++) dot(acc[r][v], code[v], each);
      }
    }
  } while (++row < count);
  ahead.at = asked;
  for (int r = 0; r < ROWS; r++) {
    for (int v = 0; v < VECS; v++) {
      int32_t* to = sums + r * width + v * kLanes;
      store(to, add ? total(acc[r][v]) + load<Ints>(to) : total(acc[r][v]));
    }
  }
}

template <int BITS, int PLACES, int COPIES, int ROWS>
inline void row_tile(const Codes& codes, int digit, const int32_t* factors, int64_t factor_width, int32_t* sums,
                     int64_t width, bool add, Ahead& ahead) {
  constexpr int64_t safe = safe_steps(Format<BITS>::kMaxField) / PLACES;  // rows that sums hold for sure
  static_assert(safe > 0, "a row of words overflows the sums");
  for (int64_t first = 0; first < codes.rows; first += safe) {
    const int64_t count = codes.rows - first < safe ? codes.rows - first : safe;
    Place at[2], next{0, digit * Format<BITS>::kFieldBits};
    for (int64_t n = 0; n < width; n += 2 * kLanes) {
      for (int v = 0; v < 2; v++) {
        at[v] = next;
        next.column += kLanes / COPIES;
        if (next.column == codes.columns) next = {0, next.shift + COPIES * BITS};
      }
      if (n + kLanes < width)
        tile<BITS, PLACES, COPIES, ROWS, 2>(codes, first, count, at, factors, factor_width, sums + n, width, add || first > 0, ahead);
      else
        tile<BITS, PLACES, COPIES, ROWS, 1>(codes, first, count, at, factors, factor_width, sums + n, width, add || first > 0, ahead);
    }
  }
}

// `sums[digit][rows][width]`, width a multiple of kLanes. `add`: to what is there. Asks for `next_bytes` from `next` on;
// behind the end of all codes that does nothing.
template <int BITS, int PLACES, int COPIES = 1>
inline void products(const Codes& codes, const int32_t* factors, int64_t factor_width, int32_t* sums, int64_t rows,
                     int64_t width, bool add, const uint8_t* next, int64_t next_bytes) {
  const int64_t tiles = rows / kTileRows + rows % kTileRows / 2 + rows % 2;
  const int64_t turns = Format<BITS>::kDigits * tiles * ((width + 2 * kLanes - 1) / (2 * kLanes)) * codes.rows * PLACES;
  Ahead ahead{next, next_bytes / turns + 1};
  for (int digit = 0; digit < Format<BITS>::kDigits; digit++, sums += rows * width) {
    int64_t r = 0;
    for (; r + kTileRows <= rows; r += kTileRows)
      row_tile<BITS, PLACES, COPIES, kTileRows>(codes, digit, factors + r * factor_width, factor_width, sums + r * width, width,
                                        add, ahead);
    for (; r + 2 <= rows; r += 2)
      row_tile<BITS, PLACES, COPIES, 2>(codes, digit, factors + r * factor_width, factor_width, sums + r * width, width,
                                        add, ahead);
    for (; r < rows; r++)
      row_tile<BITS, PLACES, COPIES, 1>(codes, digit, factors + r * factor_width, factor_width, sums + r * width, width,
                                        add, ahead);
  }
}

// Sums of one query's row (or two: high bytes, then low ones) as floats.
template <int BITS>
inline Floats joined(const int32_t* sums, int64_t digit_size, int64_t width, int64_t n, int64_t bytes) {
  Floats all{};
  for (int digit = Format<BITS>::kDigits - 1; digit >= 0; digit--) {
    const int32_t* from = sums + digit * digit_size + n;
    const Ints whole = bytes == 1 ? load<Ints>(from) : (load<Ints>(from) << 8) + load<Ints>(from + width);
    all = all * 16.0f + to_floats(whole);
  }
  return all;
}

}  // namespace specache

// `TurboQuantizer`'s codes of whole groups, as runtime/quant/turboquant.py makes them but for the order of float64 sums.
// A group's numbers lie by channel here, so that vectors hold tokens and each step is a few instructions for many of them.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <exception>
#include <vector>

#include "crew.h"
#include "rotation.h"

namespace specache {

struct CodesCall {
  int64_t dtype, bits, group_size, batch, heads, groups, dim, threads;
  const void* from;  // [batch, heads, groups * group_size, dim]; strides in elements, those of channels 1
  int64_t batch_stride, head_stride, token_stride;
  const void* balance;  // [batch, heads, dim]: what numbers are divided by; null for nothing
  const bool* counted;  // [batch, groups * group_size]: tokens that a mean counts, one a group at least; null for all
  float distance;       // of levels, in standard deviations
  uint8_t* codes;       // [batch, heads, groups * group_size, width]
  void *scale, *mean;   // [batch, heads, groups * group_size], [batch, heads, groups, dim]
};

typedef uint8_t Bytes __attribute__((vector_size(kLanes)));

// What one thread needs. Rows of tokens have `width` places: whole vectors.
struct GroupScratch {
  GroupScratch(const CodesCall& in)
      : width(round_up(in.group_size, kLanes)),
        numbers(width * in.dim),
        codes(width * in.dim),
        packed(width),
        row(in.dim),
        factors(in.dim),
        signs(in.dim),
        deviation(width, 1.0f),
        counts(in.group_size, 1.0),
        squares(in.group_size),
        steps(width) {
    const int64_t block = block_of(in.dim);
    for (int64_t c = 0; c < in.dim; c++) signs[c] = sign_of(c, block) / static_cast<float>(block);
  }
  int64_t width;
  std::vector<float> numbers;  // [dim, width]
  std::vector<uint8_t> codes;  // the same
  std::vector<uint8_t> packed;
  std::vector<float> row, factors, signs, deviation;  // signs: with the factor of the rotation
  std::vector<double> counts, squares;
  std::vector<int32_t> steps;
};

inline float saturated(double x, int64_t dtype) {
  const float most = dtype == kFloat16 ? 65504.0f : dtype == kBFloat16 ? bits_to_float(0x7f7f0000u) : bits_to_float(0x7f7fffffu);
  const float rounded = static_cast<float>(x);
  return std::min(std::max(rounded, -most), most);
}

// As it is read back.
inline float stored(void* to, int64_t at, float x, int64_t dtype) {
  from_float(to, at, x, dtype);
  float back;
  to_float(&back, row_of(to, at, dtype), 1, dtype);
  return back;
}

// Reads a group by channel; balanced, and with the signs and the factor of the rotation.
inline void read(const CodesCall& in, const void* from, const void* balance, GroupScratch& own) {
  const int64_t size = in.group_size;
  float* const row = own.row.data();
  if (balance != nullptr) to_float(own.factors.data(), balance, in.dim, in.dtype);
  for (int64_t t = 0; t < size; t++) {
    to_float(row, row_of(from, t * in.token_stride, in.dtype), in.dim, in.dtype);
    if (balance != nullptr)
      for (int64_t c = 0; c < in.dim; c++) row[c] /= own.factors[c];
    for (int64_t c = 0; c < in.dim; c++) own.numbers[c * own.width + t] = row[c] * own.signs[c];
  }
}

inline void quantize_group(const CodesCall& in, int64_t head, int64_t group, GroupScratch& own) {
  const int64_t size = in.group_size, dim = in.dim, token = (head * in.groups + group) * size;
  const int64_t offset = head / in.heads * in.batch_stride + head % in.heads * in.head_stride;
  read(in, row_of(in.from, offset + group * size * in.token_stride, in.dtype),
       in.balance == nullptr ? nullptr : row_of(in.balance, head * dim, in.dtype), own);
  float* const numbers = own.numbers.data();
  transform(numbers, dim, own.width);

  double total = static_cast<double>(size);
  if (in.counted != nullptr) {
    const bool* const counted = in.counted + (head / in.heads * in.groups + group) * size;
    std::copy(counted, counted + size, own.counts.begin());
    total = static_cast<double>(std::count(counted, counted + size, true));
  }
  const double* const counts = own.counts.data();
  std::fill(own.squares.begin(), own.squares.end(), 0.0);
  double* const squares = own.squares.data();
  for (int64_t c = 0; c < dim; c++) {
    float* x = numbers + c * own.width;
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t t = 0; t < size; t++) sum += counts[t] * x[t];
    const float mean = stored(in.mean, (head * in.groups + group) * dim + c, saturated(sum / total, in.dtype), in.dtype);
    for (int64_t t = 0; t < size; t++) {
      x[t] -= mean;
      squares[t] += static_cast<double>(x[t]) * x[t];
    }
  }

  const double root = std::sqrt(static_cast<double>(dim));
  for (int64_t t = 0; t < size; t++) {
    own.deviation[t] = static_cast<float>(std::sqrt(squares[t]) / root);
    if (own.deviation[t] == 0) own.deviation[t] = 1;
  }
  const float middle = static_cast<float>(1 << (in.bits - 1)), most = static_cast<float>((1 << in.bits) - 1);
  const int32_t twice = (1 << in.bits) - 1;
  std::fill(own.steps.begin(), own.steps.end(), 0);
  for (int64_t c = 0; c < dim; c++) {
    for (int64_t t = 0; t < own.width; t += kLanes) {
      const Floats x = load_floats(numbers + c * own.width + t) / load_floats(own.deviation.data() + t) / in.distance;
      const Floats nearest = (x + kRounder) - kRounder, level = (nearest > x ? nearest - 1.0f : nearest) + middle;
      const Floats known = level > 0.0f ? (level < most ? level : splat(most)) : Floats{};
      const Ints code = __builtin_convertvector(known, Ints), step = 2 * code - twice;
      store(own.codes.data() + c * own.width + t, __builtin_convertvector(code, Bytes));
      // Twice the distance from the middle, squared.
      store(own.steps.data() + t, load<Ints>(own.steps.data() + t) + step * step);
    }
  }
  for (int64_t t = 0; t < size; t++) {
    const double scale = std::sqrt(squares[t]) / (std::sqrt(static_cast<double>(own.steps[t])) / 2);
    from_float(in.scale, token + t, saturated(scale, in.dtype), in.dtype);
  }

  const int64_t per_byte = 8 / in.bits, bytes = (dim + per_byte - 1) / per_byte;
  uint8_t *const to = in.codes + token * bytes, *const packed = own.packed.data();
  for (int64_t byte = 0; byte < bytes; byte++) {
    const int64_t first = byte * per_byte, last = std::min(first + per_byte, dim);
    std::fill(own.packed.begin(), own.packed.end(), 0);
    for (int64_t c = first; c < last; c++) {
      const uint8_t* codes = own.codes.data() + c * own.width;
      for (int64_t t = 0; t < own.width; t++) packed[t] |= static_cast<uint8_t>(codes[t] << ((c - first) * in.bits));
    }
    for (int64_t t = 0; t < size; t++) to[t * bytes + byte] = packed[t];
  }
}

// Whether memory ran out.
inline bool quantize(const CodesCall& in) {
  const int64_t items = in.batch * in.heads * in.groups;
  std::atomic<int64_t> next{0};
  std::atomic<bool> failed{false};
  on_threads(std::min(in.threads, items), [&](int64_t) {
    try {
      GroupScratch own(in);
      for (int64_t i = next++; i < items; i = next++) quantize_group(in, i / in.groups, i % in.groups, own);
    } catch (const std::exception&) {
      failed = true;
    }
  });
  return failed;
}

}  // namespace specache

// Choosing pairs in one call: what PyTorch needs a dozen passes for, and holds Python's lock meanwhile. It defines the
// answers: see select/topk.py.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <vector>

#include "crew.h"

namespace specache {

// Larger is better: the bits of a score that is not negative, then the lower position.
using Key = uint64_t;

constexpr int64_t kBlock = 32, kSmallBlock = 8;  // scores that are looked at together
constexpr int64_t kWorthAThread = 1 << 12;

inline int32_t order_of(float score) {
  const float positive = score + 0.0f;  // -0 becomes 0
  int32_t bits;
  memcpy(&bits, &positive, 4);
  return bits;
}

// Leaves the best `count` keys, unsorted.
inline void keep_best(std::vector<Key>& keys, int64_t count) {
  std::nth_element(keys.begin(), keys.begin() + count - 1, keys.end(), std::greater<Key>());
  keys.resize(count);
}

// The largest order of some scores; a whole block is a few instructions.
inline int32_t block_maximum(const float* scores, int64_t count) {
  int32_t most = -1;
  for (int64_t i = 0; i < count; i++) most = std::max(most, order_of(scores[i]));
  return most;
}

// What one row needs while it is looked at.
struct RowScratch {
  std::vector<Key> keys;
  std::vector<int32_t> maxima, sorted;  // of blocks
};

// Leaves the keys of the `top_k` best scores in `own`, or of all that are no padding, unsorted. BLOCK scores at a time are
// passed over where none of them can be among these.
template <int64_t BLOCK>
void find_best_by(const float* scores, int64_t tokens, int64_t top_k, RowScratch& own) {
  const int64_t blocks = (tokens + BLOCK - 1) / BLOCK, whole = tokens / BLOCK;
  own.keys.clear();
  own.maxima.resize(blocks);
  for (int64_t b = 0; b < whole; b++) own.maxima[b] = block_maximum(scores + b * BLOCK, BLOCK);
  if (whole < blocks) own.maxima[whole] = block_maximum(scores + whole * BLOCK, tokens - whole * BLOCK);
  // So many blocks have a score that reaches it, so the chosen ones do, too. Below 0 they are padding.
  int32_t bar = 0;
  if (blocks > top_k) {
    own.sorted = own.maxima;
    std::nth_element(own.sorted.begin(), own.sorted.begin() + top_k - 1, own.sorted.end(), std::greater<int32_t>());
    bar = std::max(own.sorted[top_k - 1], 0);
  }
  int64_t at_bar = 0;  // of those that equal it, the first ones suffice
  for (int64_t b = 0; b < blocks; b++) {
    if (own.maxima[b] < bar || (own.maxima[b] == bar && at_bar >= top_k)) continue;
    for (int64_t i = b * BLOCK; i < std::min((b + 1) * BLOCK, tokens); i++) {
      const int32_t order = order_of(scores[i]);
      if (order > bar || (order == bar && at_bar++ < top_k))
        own.keys.push_back(static_cast<Key>(order) << 32 | static_cast<uint32_t>(~i));
    }
  }
  if (static_cast<int64_t>(own.keys.size()) > top_k) keep_best(own.keys, top_k);
}

// Likewise. Large blocks are passed over only where there are many more of them than `top_k`.
inline void find_best(const float* scores, int64_t tokens, int64_t top_k, RowScratch& own) {
  if (tokens >= 2 * top_k * kBlock)
    find_best_by<kBlock>(scores, tokens, top_k, own);
  else
    find_best_by<kSmallBlock>(scores, tokens, top_k, own);
}

inline void choose(const float* scores, int64_t tokens, int64_t top_k, RowScratch& own, int32_t* chosen) {
  find_best(scores, tokens, top_k, own);
  std::sort(own.keys.begin(), own.keys.end(), std::greater<Key>());
  const int64_t found = own.keys.size();
  for (int64_t i = 0; i < top_k; i++)
    chosen[i] = i < found ? static_cast<int32_t>(~static_cast<uint32_t>(own.keys[i])) : -1;
}

// What `slots` positions have of the best scores; see `TopkOverlap`.
struct Overlap {
  double hits = 0, needed = 0, mass = 0, best_mass = 0;
};

inline Overlap compare(const float* scores, int64_t tokens, int64_t top_k, RowScratch& own, const int32_t* staged,
                       int64_t slots) {
  find_best(scores, tokens, top_k, own);
  Overlap overlap;
  overlap.needed = static_cast<double>(own.keys.size());
  for (const Key key : own.keys) overlap.best_mass += scores[~static_cast<uint32_t>(key)];
  // Where fewer than top_k are no padding, all of these are the best.
  const bool all = static_cast<int64_t>(own.keys.size()) < top_k;
  const Key bar = all || own.keys.empty() ? 0 : *std::min_element(own.keys.begin(), own.keys.end());
  for (int64_t i = 0; i < slots; i++) {
    const int32_t token = staged[i], order = token < 0 || token >= tokens ? -1 : order_of(scores[token]);
    if (order < 0) continue;
    overlap.hits += (static_cast<Key>(order) << 32 | static_cast<uint32_t>(~token)) >= bar;
    overlap.mass += scores[token];
  }
  return overlap;
}

// Calls `function(row, scratch)` for each row of so many tokens, on `threads` threads. Whether memory ran out.
template <class F>
bool for_rows(int64_t rows, int64_t tokens, int64_t threads, F function) {
  // Small work is done before another thread has woken up.
  if (rows * tokens < kWorthAThread) threads = 1;
  std::atomic<int64_t> next{0};
  std::atomic<bool> failed{false};
  on_threads(threads, [&](int64_t) {
    try {
      thread_local RowScratch own;
      for (int64_t row = next++; row < rows; row = next++) function(row, own);
    } catch (const std::exception&) {
      failed = true;
    }
  });
  return failed;
}

// Whether memory ran out. `scores[rows][tokens]`, rows `stride` apart; `chosen[rows][top_k]`.
inline bool select_topk(const float* scores, int64_t rows, int64_t stride, int64_t tokens, int64_t top_k,
                        int32_t* chosen, int64_t threads) {
  if (top_k < 1) return false;
  return for_rows(rows, tokens, threads, [&](int64_t row, RowScratch& own) {
    choose(scores + row * stride, tokens, top_k, own, chosen + row * top_k);
  });
}

// Adds to `counts[batch][4]` what `staged[batch][heads][slots]` has of what `select_topk` would choose, summed over the
// heads; see `TopkOverlap`. Whether memory ran out: then nothing is added.
inline bool count_overlap(const float* scores, int64_t batch, int64_t heads, int64_t stride, int64_t tokens,
                          int64_t top_k, const int32_t* staged, int64_t slots, double* counts, int64_t threads) {
  const int64_t rows = batch * heads;
  std::vector<Overlap> each;
  try {
    each.resize(rows);
  } catch (const std::exception&) {
    return true;
  }
  const bool failed = for_rows(rows, tokens, threads, [&](int64_t row, RowScratch& own) {
    each[row] = compare(scores + row * stride, tokens, top_k, own, staged + row * slots, slots);
  });
  if (failed) return true;
  for (int64_t row = 0; row < rows; row++) {
    double* const of_batch_row = counts + row / heads * 4;
    of_batch_row[0] += each[row].hits;
    of_batch_row[1] += each[row].needed;
    of_batch_row[2] += each[row].mass;
    of_batch_row[3] += each[row].best_mass;
  }
  return false;
}

}  // namespace specache

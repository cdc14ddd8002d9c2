// Copies wanted rows from the host to a layer's slots. NumPy, which defines the answers (transfer/staging.py), takes a
// dozen passes and holds Python's lock.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>
#include <vector>

#include "host_rows.h"

namespace specache {

enum Failure : int64_t { kNoFailure = 0, kNoMemory = 1, kNotOnHost = 2 };

// A layer's slots.
struct Slots {
  int64_t rows, top_k, row_bytes;  // `rows`: batch rows times kv heads
  const int32_t* wanted;           // [rows][top_k], unique in a row; -1 is none
  int32_t* tokens;                 // [rows][top_k]: which are staged
  uint8_t* staged;                 // [rows][top_k][row_bytes]
};

struct Staged {
  int64_t failure;
  int64_t fetched, kept;  // rows that were copied, rows that were there; kNotOnHost: `fetched` is the token
};

constexpr int64_t kRowsAhead = 4, kLine = 64;

// The places of one row's wanted tokens, by token: open addressing.
class Places {
 public:
  explicit Places(int64_t top_k) {
    int64_t size = 8;
    while (size < 2 * top_k) size *= 2;
    tokens_.resize(size);
    places_.resize(size);
  }
  void clear() { std::fill(tokens_.begin(), tokens_.end(), -1); }
  void add(int32_t token, int64_t place) {
    const int64_t at = find(token);
    tokens_[at] = token;
    places_[at] = place;
  }
  // -1 where it isn't wanted.
  int64_t of(int32_t token) const {
    const int64_t at = find(token);
    return tokens_[at] == token ? places_[at] : -1;
  }

 private:
  int64_t find(int32_t token) const {
    const uint64_t mask = tokens_.size() - 1;
    uint64_t at = static_cast<uint32_t>(token) * 0x9e3779b1u & mask;
    while (tokens_[at] != -1 && tokens_[at] != token) at = (at + 1) & mask;
    return static_cast<int64_t>(at);
  }
  std::vector<int32_t> tokens_;
  std::vector<int64_t> places_;
};

// Where it fails, nothing has changed.
inline Staged stage(const HostRows& host, const Slots& s) {
  const auto last = std::max_element(s.wanted, s.wanted + s.rows * s.top_k);
  if (last != s.wanted + s.rows * s.top_k && *last >= host.length) return {kNotOnHost, *last, 0};
  struct RowCopy {
    const uint8_t* from;
    uint8_t* to;
  };
  std::vector<RowCopy> copies;
  int64_t kept = 0;
  try {
    Places places(s.top_k);
    std::vector<char> held(s.top_k);
    std::vector<int64_t> free;
    free.reserve(s.top_k);
    copies.reserve(s.rows * s.top_k);  // nothing fails once a slot has changed
    for (int64_t row = 0; row < s.rows; row++) {
      const int32_t* const wanted = s.wanted + row * s.top_k;
      int32_t* const tokens = s.tokens + row * s.top_k;
      places.clear();
      free.clear();
      std::fill(held.begin(), held.end(), 0);
      for (int64_t i = 0; i < s.top_k; i++)
        if (wanted[i] >= 0) places.add(wanted[i], i);
      for (int64_t i = 0; i < s.top_k; i++) {
        const int64_t place = tokens[i] >= 0 ? places.of(tokens[i]) : -1;
        if (place >= 0) {
          held[place] = 1;
          kept++;
        } else {
          tokens[i] = -1;
          free.push_back(i);
        }
      }
      // No token is in two slots, or wanted twice, so those that stay and those that come are top_k together at most:
      // the free slots suffice.
      int64_t next = 0;
      for (int64_t i = 0; i < s.top_k; i++) {
        if (wanted[i] < 0 || held[i]) continue;
        const int64_t slot = free[next++];
        copies.push_back(
            {host.row(row, wanted[i], s.row_bytes), s.staged + (row * s.top_k + slot) * s.row_bytes});
        tokens[slot] = wanted[i];
      }
    }
  } catch (const std::exception&) {
    return {kNoMemory, 0, 0};
  }
  const int64_t fetched = copies.size();
  for (int64_t i = 0; i < fetched; i++) {
    // A row lies anywhere in the host's memory: the next ones come while this one is copied.
    if (i + kRowsAhead < fetched)
      for (int64_t at = 0; at < s.row_bytes; at += kLine) __builtin_prefetch(copies[i + kRowsAhead].from + at);
    memcpy(copies[i].to, copies[i].from, s.row_bytes);
  }
  return {kNoFailure, fetched, kept};
}

}  // namespace specache

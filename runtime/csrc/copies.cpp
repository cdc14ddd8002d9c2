// Bringing rows from the host to a layer's slots: what NumPy needs a dozen passes for, and holds Python's lock meanwhile.
// NumPy defines the answers (staging.py); copies.py calls this.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <exception>
#include <vector>

#include "stage.h"

namespace {

constexpr int64_t kRowsAhead = 4, kLine = 64;

struct RowCopy {
  const uint8_t* from;
  uint8_t* to;
};

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

// 0; 1 where memory ran out; 2 where a token is not on the host, which `fetched` then is. Nothing has changed then.
int64_t stage(SpecacheStage* s) {
  s->fetched = s->kept = 0;
  for (int64_t i = 0; i < s->rows * s->top_k; i++) {
    if (s->wanted[i] >= s->length) {
      s->fetched = s->wanted[i];
      return 2;
    }
  }
  std::vector<RowCopy> copies;
  try {
    Places places(s->top_k);
    std::vector<char> held(s->top_k);
    std::vector<int64_t> free;
    free.reserve(s->top_k);
    copies.reserve(s->rows * s->top_k);  // nothing fails once a slot has changed
    for (int64_t row = 0; row < s->rows; row++) {
      const int32_t* wanted = s->wanted + row * s->top_k;
      int32_t* slots = s->slots + row * s->top_k;
      places.clear();
      free.clear();
      std::fill(held.begin(), held.end(), 0);
      for (int64_t i = 0; i < s->top_k; i++)
        if (wanted[i] >= 0) places.add(wanted[i], i);
      for (int64_t i = 0; i < s->top_k; i++) {
        const int64_t place = slots[i] >= 0 ? places.of(slots[i]) : -1;
        if (place >= 0) {
          held[place] = 1;
          s->kept++;
        } else {
          slots[i] = -1;
          free.push_back(i);
        }
      }
      // No token is in two slots, or wanted twice, so those that stay and those that come are top_k together at most:
      // the free slots suffice.
      int64_t next = 0;
      for (int64_t i = 0; i < s->top_k; i++) {
        if (wanted[i] < 0 || held[i]) continue;
        const int64_t slot = free[next++], token = wanted[i];
        const int64_t block = std::upper_bound(s->starts + 1, s->starts + s->num_blocks, token) - s->starts - 1;
        const int64_t tokens = s->starts[block + 1] - s->starts[block];
        const uint8_t* from = s->blocks[block] + (row * tokens + token - s->starts[block]) * s->row_bytes;
        copies.push_back({from, s->staged + (row * s->top_k + slot) * s->row_bytes});
        slots[slot] = wanted[i];
      }
    }
  } catch (const std::exception&) {
    return 1;
  }
  s->fetched = copies.size();
  for (int64_t i = 0; i < s->fetched; i++) {
    // A row lies anywhere in the host's memory: the next ones come while this one is copied.
    if (i + kRowsAhead < s->fetched)
      for (int64_t at = 0; at < s->row_bytes; at += kLine) __builtin_prefetch(copies[i + kRowsAhead].from + at);
    memcpy(copies[i].to, copies[i].from, s->row_bytes);
  }
  return 0;
}

}  // namespace

extern "C" {

int64_t specache_stage_size() { return sizeof(SpecacheStage); }

int64_t specache_stage(SpecacheStage* s) {
  const auto start = std::chrono::steady_clock::now();
  const int64_t failed = stage(s);
  s->seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return failed;
}
}

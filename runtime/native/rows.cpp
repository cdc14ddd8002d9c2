// Choosing pairs and bringing them from the host, one call each: what PyTorch and NumPy need a dozen passes for, and
// hold Python's lock meanwhile. They define the answers: see select/topk.py and staging.py.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <vector>

namespace {

// Larger is better: the bits of a score that is not negative, then the lower position.
using Key = uint64_t;

constexpr int64_t kBlock = 32;  // scores that are looked at together

inline int32_t order_of(float score) {
  const float positive = score + 0.0f;  // -0 becomes 0
  int32_t bits;
  memcpy(&bits, &positive, 4);
  return bits;
}

// Leaves the best `count` keys, unsorted, and returns the bits of the worst of them.
int32_t keep_best(std::vector<Key>& keys, int64_t count) {
  std::nth_element(keys.begin(), keys.begin() + count - 1, keys.end(), std::greater<Key>());
  keys.resize(count);
  return static_cast<int32_t>(keys.back() >> 32);
}

// Adds the scores above `bar` of `count` <= kBlock; the usual case, a whole block without any, is a few instructions.
inline void add_above(const float* scores, int64_t first, int64_t count, int32_t bar, std::vector<Key>& keys) {
  int32_t order[kBlock], any = 0;
  for (int64_t i = 0; i < count; i++) order[i] = order_of(scores[first + i]);
  for (int64_t i = 0; i < count; i++) any |= order[i] > bar ? -1 : 0;
  if (!any) return;
  for (int64_t i = 0; i < count; i++)
    if (order[i] > bar) keys.push_back(static_cast<Key>(order[i]) << 32 | static_cast<uint32_t>(~(first + i)));
}

void choose(const float* scores, int64_t tokens, int64_t top_k, std::vector<Key>& keys, int32_t* chosen) {
  keys.clear();
  const int64_t room = 2 * top_k + 64;
  int32_t bar = -1;  // what a score has to be above; a later one that equals it loses by its position
  int64_t first = 0;
  for (; first + kBlock <= tokens; first += kBlock) {
    add_above(scores, first, kBlock, bar, keys);
    if (static_cast<int64_t>(keys.size()) >= room) bar = keep_best(keys, top_k);
  }
  add_above(scores, first, tokens - first, bar, keys);
  if (static_cast<int64_t>(keys.size()) > top_k) keep_best(keys, top_k);
  std::sort(keys.begin(), keys.end(), std::greater<Key>());
  for (int64_t i = 0; i < top_k; i++)
    chosen[i] = i < static_cast<int64_t>(keys.size()) ? static_cast<int32_t>(~static_cast<uint32_t>(keys[i])) : -1;
}

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

}  // namespace

extern "C" {

// 0, or 1 where memory ran out. `scores[rows][tokens]`, rows `stride` apart; `chosen[rows][top_k]`.
int64_t specache_topk(const float* scores, int64_t rows, int64_t stride, int64_t tokens, int64_t top_k,
                      int32_t* chosen) {
  try {
    std::vector<Key> keys;
    keys.reserve(2 * std::min(top_k, tokens) + 64 + kBlock);
    for (int64_t row = 0; row < rows && top_k > 0; row++)
      choose(scores + row * stride, tokens, top_k, keys, chosen + row * top_k);
  } catch (const std::exception&) {
    return 1;
  }
  return 0;
}

struct SpecacheStage {
  int64_t rows, top_k, row_bytes;  // `rows`: batch rows times kv heads
  int64_t length, num_blocks;      // tokens on the host
  const uint8_t* const* blocks;    // [rows][tokens of the block][row_bytes] each
  const int64_t* starts;           // [num_blocks + 1]: first tokens of the blocks, and the end of the last
  const int32_t* wanted;           // [rows][top_k]
  int32_t* slots;                  // [rows][top_k]: which tokens are staged
  uint8_t* staged;                 // [rows][top_k][row_bytes]
  int64_t fetched, kept;           // out: rows that were copied, rows that were there
};

// 0; 1 where memory ran out; 2 where a token is not on the host, which `fetched` then is. Nothing has changed then.
int64_t specache_stage(SpecacheStage* s) {
  s->fetched = s->kept = 0;
  for (int64_t i = 0; i < s->rows * s->top_k; i++) {
    if (s->wanted[i] >= s->length) {
      s->fetched = s->wanted[i];
      return 2;
    }
  }
  try {
    Places places(s->top_k);
    std::vector<char> held(s->top_k);
    std::vector<int64_t> free;
    free.reserve(s->top_k);
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
        memcpy(s->staged + (row * s->top_k + slot) * s->row_bytes, from, s->row_bytes);
        slots[slot] = wanted[i];
        s->fetched++;
      }
    }
  } catch (const std::exception&) {
    return 1;
  }
  return 0;
}
}

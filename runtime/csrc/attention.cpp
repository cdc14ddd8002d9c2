// Decode attention over a low-bit KV cache: scores, softmax and values in one pass over the packed codes, for all lanes
// and the whole group of query heads at once. See docs/kernels.md.
#include <atomic>
#include <memory>
#include <new>
#include <vector>

#include "crew.h"
#include "finish.h"
#include "same_step.h"

namespace specache {

// Memory that a calling thread keeps from one step to the next.
class Buffer {
 public:
  ~Buffer() { release(); }
  char* of_size(int64_t size) {
    if (size > size_) {
      release();
      data_ = static_cast<char*>(::operator new(size, std::align_val_t{64}));
      size_ = size;
    }
    return data_;
  }

 private:
  void release() {
    if (data_ != nullptr) ::operator delete(data_, std::align_val_t{64});
    data_ = nullptr;
    size_ = 0;
  }
  char* data_ = nullptr;
  int64_t size_ = 0;
};

template <int BITS>
void load_queries(const Head& h) {
  const SpecacheInputs& in = h.in;
  const Sizes& s = h.s;
  if (in.centred) to_float(h.spare, h.at(in.key_balance, 0, in.key_dim), in.key_dim, in.dtype);
  for (int64_t q = 0; q < s.queries; q++) {
    float* query = h.query + q * s.key_pad;
    to_float(query, row_of(in.query, h.query_row(q) * in.key_dim, in.dtype), in.key_dim, in.dtype);
    for (int64_t c = 0; c < in.key_dim; c++) query[c] *= in.scale;
    float* code_query = h.code_query + q * s.key_pad;
    if (in.centred) {
      for (int64_t c = 0; c < in.key_dim; c++) code_query[c] = query[c] * h.spare[c];
      for (int64_t c = in.key_dim; c < s.key_pad; c++) code_query[c] = 0;
      rotate(code_query, in.key_dim);
    }
    packed_order<BITS>(code_query, s.key_steps, h.packed_query + q * s.key_pad);
  }
}

// Part `part` of `num_parts` of a head; the first one has the exact pairs.
struct Part {
  int64_t part, num_parts;
  int64_t begin(const Sizes& s) const { return s.chunks * part / num_parts; }
  int64_t end(const Sizes& s) const { return s.chunks * (part + 1) / num_parts; }
};

// Calls `visit(first, n)` for each chunk of a part.
template <class Visit>
void for_chunks(const Head& h, const Part& part, const Visit& visit) {
  for (int64_t chunk = part.begin(h.s); chunk < part.end(h.s); chunk++) {
    const int64_t first = chunk * h.s.chunk, left = h.in.num_quantized - first;
    visit(first, left < h.s.chunk ? left : h.s.chunk);
  }
}

template <int BITS>
void start_part(Head& h, const Part& part) {
  const Sizes& s = h.s;
  load_queries<BITS>(h);
  for (int64_t q = 0; q < s.queries; q++) {
    h.result->maximum[q] = -kInfinity;
    h.result->mass[q] = 0;
  }
  memset(h.result->out, 0, 4 * s.queries * s.value_pad);
  if (part.part == 0) add_exact(h);
}

// A head's work. In one pass, scores and values in turn; or in two, with a choice in between (same_step.h).
enum Pass { kAll, kScores, kValues };

// A head, or one of the parts that it is read in.
struct Item {
  int64_t head;
  Part part;
  int64_t slot, result;  // where its probabilities go (those of one head to one place), and what it comes to
  Pass pass;
};

// All heads, in the order in which threads take them. Cores may differ in speed, and one may be asked for something else:
// the fewer heads are left, the smaller the pieces, so that threads come to an end together. `later` has the values of
// heads in pieces that are read in two passes.
struct Items {
  std::vector<Item> first, later;
};

inline Items items_of(int64_t heads, int64_t chunks, int64_t threads, bool chooses) {
  Items items;
  int64_t slot = threads, result = threads;  // a head in one piece is finished before its thread takes the next
  for (int64_t head = 0; head < heads; head++) {
    const int64_t left = heads - head, wanted = threads == 1 ? 1 : (threads + left - 1) / left;
    const int64_t num_parts = wanted < chunks ? wanted : chunks > 0 ? chunks : 1;
    for (int64_t part = 0; part < num_parts; part++) {
      const bool twice = chooses && num_parts > 1;
      items.first.push_back({head, {part, num_parts}, slot, result + part, twice ? kScores : kAll});
      if (twice) items.later.push_back({head, {part, num_parts}, slot, result + part, kValues});
    }
    if (num_parts == 1) continue;
    slot++;
    result += num_parts;
  }
  return items;
}

// One of the `later` items that nobody has taken; null where the calling thread is to leave. An item waits for its head's
// choice, which another thread may be about to make. That thread may be without a core, so nobody waits for longer than
// it has worked since `began`: whoever makes a choice is there for all that follows from it.
inline const Item* take_later(const std::vector<Item>& later, std::vector<std::atomic<bool>>& taken,
                              const std::vector<std::atomic<int64_t>>& scores_left, Moment began) {
  const Item* found = nullptr;
  const auto is_done = [&] {
    bool is_left = false;
    for (size_t i = 0; i < later.size() && found == nullptr; i++) {
      if (taken[i]) continue;
      is_left = true;
      if (scores_left[later[i].head] < 0 && !taken[i].exchange(true)) found = &later[i];
    }
    return found != nullptr || !is_left;
  };
  const Moment now = std::chrono::steady_clock::now();
  spin_until(is_done, now + (now - began));
  return found;
}

template <int BITS>
void attention(const SpecacheInputs& in) {
  const Sizes s(in);
  const int64_t heads = in.batch * in.kv_heads;
  // Small work is done before another thread has woken up.
  const int64_t work = heads * (s.stored + in.num_staged) * s.queries * (in.key_dim + in.value_dim);
  const int64_t threads = work < (1 << 20) ? 1 : in.threads;
  const bool chooses = in.chooses && s.chunks > 0;
  const Items items = items_of(heads, s.chunks, threads, chooses);

  thread_local Buffer buffer;
  Scratch counted{nullptr};
  Head(in, s, counted);
  const int64_t head_size = counted.used;
  int64_t num_slots = threads, num_results = threads;
  for (const Item& item : items.first) {
    if (item.part.num_parts == 1) continue;
    num_slots = std::max(num_slots, item.slot + 1);
    num_results = std::max(num_results, item.result + 1);
  }
  Scratch sizes{nullptr, threads * head_size};
  for (int64_t i = 0; i < num_slots; i++) Probs(sizes, s);
  for (int64_t i = 0; i < num_results; i++) Result(sizes, s);
  Scratch scratch{buffer.of_size(sizes.used), threads * head_size};
  std::vector<Probs> probs;
  std::vector<Result> results;
  for (int64_t i = 0; i < num_slots; i++) probs.emplace_back(scratch, s);
  for (int64_t i = 0; i < num_results; i++) results.emplace_back(scratch, s);
  char* const base = scratch.base;
  thread_local std::vector<Choice> kept_choices;
  std::vector<Choice>& choices = kept_choices;  // this thread's, in all of them
  if (chooses && static_cast<int64_t>(choices.size()) < num_slots) choices.resize(num_slots);

  std::vector<std::atomic<int64_t>> scores_left(heads), parts_left(heads);
  for (const Item& item : items.first) scores_left[item.head] = parts_left[item.head] = item.part.num_parts;
  std::vector<std::atomic<bool>> taken(items.later.size());
  std::atomic<size_t> next{0};
  std::atomic<bool> failed{false};
  on_threads(threads, [&](int64_t thread) {
    const Moment began = std::chrono::steady_clock::now();
    const auto take = [&]() -> const Item* {
      const size_t i = next++;
      return i < items.first.size() ? &items.first[i] : take_later(items.later, taken, scores_left, began);
    };
    while (const Item* const each = take()) {
      const Item& item = *each;
      const Part& part = item.part;
      const bool whole = part.num_parts == 1;
      const int64_t slot = whole ? thread : item.slot;
      Result* const result = &results[whole ? thread : item.result];
      // Zeros: what is padded must not hold NaN, which would survive being multiplied with 0.
      memset(base + thread * head_size, 0, head_size);
      Scratch own{base + thread * head_size};
      Head h(in, s, own);
      h.batch_row = item.head / in.kv_heads;
      h.kv_head = item.head % in.kv_heads;
      h.probs = &probs[slot];
      h.result = result;
      if (item.pass != kValues) {
        start_part<BITS>(h, part);
        for_chunks(h, part, [&](int64_t first, int64_t n) {
          chooses ? score_stored<BITS>(h, first, n) : add_chunk<BITS>(h, first, n);
        });
        if (chooses && --scores_left[item.head] == 0) {
          try {
            choose<BITS>(h, result - part.part, part.num_parts, choices[slot]);
          } catch (const std::bad_alloc&) {
            choices[slot] = {};
            failed = true;
          }
          scores_left[item.head] = -1;
        }
      }
      if (item.pass == kScores || failed) continue;
      if (chooses) add_chosen<BITS>(h, part.begin(s), part.end(s), choices[slot]);
      join_out<BITS>(h);
      if (--parts_left[item.head] > 0) continue;
      h.result = result - part.part;
      if (!whole) merge(h.result, part.num_parts, s);
      if (chooses) std::copy(choices[slot].mass.begin(), choices[slot].mass.end(), h.result->mass);
      write_out(h);
      write_scores(h);
    }
  });
  if (failed) throw std::bad_alloc();
}

}  // namespace specache

extern "C" {

// Whoever loads an old build of another layout is to notice.
int64_t specache_inputs_size() { return sizeof(SpecacheInputs); }

// 0, or 1 where memory ran out.
int64_t specache_attention(const SpecacheInputs* in) {
  try {
    if (in->bits == 1) specache::attention<1>(*in);
    if (in->bits == 2) specache::attention<2>(*in);
    if (in->bits == 4) specache::attention<4>(*in);
    if (in->bits == 8) specache::attention<8>(*in);
  } catch (const std::bad_alloc&) {
    return 1;
  }
  return 0;
}
}

// Operators that a graph calls on the CPU without Python between: `specache::products` (passes/few_row_products.py) and
// `specache::layer_step`; `specache::replay` makes the calls of a whole step. And `specache::stage`, the copy of a layer
// step alone, and its selection; `specache::centred_codes`, of a prompt and of full groups; `specache::following`, of
// speculative tokens; `specache::row_sums`, of fingerprints.
#include <unistd.h>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "codes.h"
#include "layer_step.h"
#include "products.cpp"
#include "tape.h"

namespace {

using specache::empty;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

bool are_int8(const std::vector<Tensor>& weights) { return weights[0].scalar_type() == ScalarType::Char; }

void check(const Tensor& rows, const std::vector<Tensor>& weights) {
  const ScalarType dtype = rows.scalar_type(), wanted = are_int8(weights) ? ScalarType::Char : dtype;
  STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::BFloat16,
                  "specache::products: rows are neither float32 nor bfloat16");
  const int64_t in = rows.dim() < 2 ? 0 : rows.size(-1);
  STD_TORCH_CHECK(in > 0, "specache::products: rows are to be [..., in]");
  for (const Tensor& weight : weights)
    STD_TORCH_CHECK(weight.dim() == 2 && weight.size(1) == in && weight.scalar_type() == wanted &&
                        weight.is_contiguous(),
                    "specache::products: a weight is to be [out, in], contiguous, of the dtype of the rows; or all int8");
}

// The call of `specache_products` that computes `results`. `rows` are contiguous, weights kMaxWeights at most.
SpecacheProducts call_for(const Tensor& rows, const std::vector<Tensor>& weights, const std::vector<Tensor>& results) {
  const int64_t in = rows.size(-1), num_weights = weights.size();
  SpecacheProducts p = {rows.numel() / in, in, rows.scalar_type() == ScalarType::BFloat16, are_int8(weights), num_weights};
  p.rows = rows.data_ptr();
  for (int64_t i = 0; i < num_weights; i++) {
    p.weights[i] = weights[i].data_ptr();
    p.out[i] = weights[i].size(0);
    p.results[i] = results[i].data_ptr();
  }
  return p;
}

void multiply(SpecacheProducts p) {
  p.threads = torch::stable::get_num_threads();
  specache_products(&p);
}

std::vector<Tensor> products(Tensor rows, std::vector<Tensor> weights) {
  check(rows, weights);
  std::vector<Tensor> results;
  results.reserve(weights.size());
  const int64_t num_rows = rows.numel() / rows.size(-1);
  if (num_rows < 1 || num_rows > kMaxRows) {
    STD_TORCH_CHECK(!are_int8(weights), "specache::products: weights in int8 take 1 to ", kMaxRows, " rows, not ", num_rows);
    for (const Tensor& weight : weights)
      results.push_back(torch::stable::matmul(rows, torch::stable::transpose(weight, 0, 1)));
    return results;
  }
  const Tensor packed = rows.is_contiguous() ? rows : torch::stable::contiguous(rows);
  std::vector<int64_t> shape;
  for (int64_t d = 0; d < rows.dim(); d++) shape.push_back(rows.size(d));
  for (const Tensor& weight : weights) {
    const Tensor result = empty({num_rows, weight.size(0)}, rows);
    shape.back() = weight.size(0);
    results.push_back(rows.dim() == 2 ? result : torch::stable::view(result, shape));
  }
  multiply(call_for(packed, weights, results));
  return results;
}

// `specache::products.ofN`. Results are N tensors, not a list: Inductor's C++ wrapper takes no list.
template <class Numbers>
struct ProductsOf;
template <size_t... I>
struct ProductsOf<std::index_sequence<I...>> {
  template <size_t>
  using Each = Tensor;
  static std::tuple<Each<I>...> run(Tensor rows, Each<I>... weights) {
    const std::vector<Tensor> results = products(rows, {weights...});
    return {results[I]...};
  }
};
template <size_t N>
using Products = ProductsOf<std::make_index_sequence<N>>;
static_assert(kMaxWeights == 8, "as many are defined");

specache::Tape& tape_at(int64_t address) { return *reinterpret_cast<specache::Tape*>(address); }

// Notes what `products` has computed. Weights are not kept: who replays sees to it that they are where they were.
void note_products(int64_t tape, Tensor rows, std::vector<Tensor> weights, std::vector<Tensor> results) {
  check(rows, weights);
  const int64_t num_rows = rows.numel() / rows.size(-1);
  STD_TORCH_CHECK(rows.is_contiguous() && num_rows >= 1 && num_rows <= kMaxRows && weights.size() == results.size() &&
                      weights.size() <= kMaxWeights,
                  "specache::note_products: these are no few rows");
  tape_at(tape).calls.push_back([p = call_for(rows, weights, results)] { multiply(p); });
}

// Notes what `layer_step` has done.
void note_layer_step(int64_t tape, Tensor out, Tensor query, Tensor key, Tensor value, Tensor state, int64_t layer,
                     double scale, std::optional<double> softcap, std::optional<Tensor> sinks) {
  tape_at(tape).calls.push_back(
      [=] { specache::layer_step_into(out, query, key, value, state, layer, scale, softcap, sinks); });
}

void replay(int64_t tape) {
  for (const auto& call : tape_at(tape).calls) call();
}

// A `Failure`, then rows that came (or the token that is not on the host) and rows that were there.
std::vector<int64_t> stage(Tensor table, int64_t length, Tensor wanted, Tensor tokens, Tensor rows) {
  const auto is = [](const Tensor& x, ScalarType type) { return x.scalar_type() == type && x.is_contiguous(); };
  STD_TORCH_CHECK(is(table, ScalarType::Long) && is(wanted, ScalarType::Int) && is(tokens, ScalarType::Int) &&
                      rows.is_contiguous() && wanted.dim() == 3 && rows.dim() == 4 &&
                      wanted.numel() == tokens.numel() && wanted.numel() * rows.size(3) == rows.numel(),
                  "specache::stage: these are no slots");
  const specache::Slots slots = {wanted.size(0) * wanted.size(1),
                                 wanted.size(2),
                                 rows.size(3) * static_cast<int64_t>(rows.element_size()),
                                 static_cast<const int32_t*>(wanted.data_ptr()),
                                 static_cast<int32_t*>(tokens.data_ptr()),
                                 static_cast<uint8_t*>(rows.data_ptr())};
  const specache::Staged done = specache::stage({static_cast<const int64_t*>(table.data_ptr()), length}, slots);
  return {done.failure, done.fetched, done.kept};
}

// Scores `[batch, heads, tokens]` whose rows lie evenly apart: a slice of more tokens does.
Tensor even_rows(const Tensor& scores) {
  STD_TORCH_CHECK(scores.dim() == 3 && scores.scalar_type() == ScalarType::Float,
                  "specache: scores are to be float32 [batch, heads, tokens]");
  const bool even = scores.stride(2) == 1 && scores.stride(0) == scores.size(1) * scores.stride(1);
  return even ? scores : torch::stable::contiguous(scores);
}

// See select/topk.py. Whether memory ran out.
bool select_topk(Tensor scores, int64_t top_k, Tensor chosen) {
  const Tensor rows = even_rows(scores);
  const int64_t count = rows.size(0) * rows.size(1);
  STD_TORCH_CHECK(chosen.scalar_type() == ScalarType::Int && chosen.is_contiguous() && chosen.numel() == count * top_k,
                  "specache::select_topk: chosen is to be int32 [batch, heads, top_k]");
  return specache::select_topk(static_cast<const float*>(rows.data_ptr()), count, rows.stride(1), rows.size(2), top_k,
                               static_cast<int32_t*>(chosen.data_ptr()), torch::stable::get_num_threads());
}

// Likewise, of `count_overlap`.
bool count_overlap(Tensor scores, int64_t top_k, Tensor positions, Tensor counts) {
  const Tensor rows = even_rows(scores);
  const Tensor staged = positions.is_contiguous() ? positions : torch::stable::contiguous(positions);
  const int64_t batch = rows.size(0), heads = rows.size(1);
  STD_TORCH_CHECK(staged.dim() == 3 && staged.scalar_type() == ScalarType::Int && staged.size(0) == batch &&
                      staged.size(1) == heads && counts.scalar_type() == ScalarType::Double && counts.is_contiguous() &&
                      counts.numel() == 4 * batch,
                  "specache::count_overlap: positions are to be int32 [batch, heads, slots], counts float64 [batch, 4]");
  return specache::count_overlap(static_cast<const float*>(rows.data_ptr()), batch, heads, rows.stride(1), rows.size(2),
                                 top_k, static_cast<const int32_t*>(staged.data_ptr()), staged.size(2),
                                 static_cast<double*>(counts.data_ptr()), torch::stable::get_num_threads());
}

// See quant/turboquant.py: codes, scale and mean; nothing where memory ran out.
std::vector<Tensor> centred_codes(Tensor x, std::optional<Tensor> balance, std::optional<Tensor> counted, int64_t bits,
                                  int64_t group_size, double distance) {
  STD_TORCH_CHECK(x.dim() == 4 && specache::dtype_of(x) >= 0 && group_size > 0 && x.size(2) % group_size == 0,
                  "specache::centred_codes: x is to be [batch, heads, groups * group_size, dim], of a KV dtype");
  const Tensor from = x.stride(3) == 1 ? x : torch::stable::contiguous(x);
  const int64_t batch = x.size(0), heads = x.size(1), tokens = x.size(2), dim = x.size(3), groups = tokens / group_size;
  const Tensor codes = empty({batch, heads, tokens, (dim * bits + 7) / 8}, aoti_torch_dtype_uint8()),
               scale = empty({batch, heads, tokens, 1}, x), mean = empty({batch, heads, groups, dim}, x);
  const std::optional<Tensor> divisor = balance ? std::optional(torch::stable::contiguous(*balance)) : std::nullopt;
  const std::optional<Tensor> counts = counted ? std::optional(torch::stable::contiguous(*counted)) : std::nullopt;
  const specache::CodesCall in = {
      specache::dtype_of(x), bits, group_size, batch, heads, groups, dim,
      torch::stable::get_num_threads(),
      from.data_ptr(), from.stride(0), from.stride(1), from.stride(2),
      divisor ? divisor->data_ptr() : nullptr,
      counts ? static_cast<const bool*>(counts->data_ptr()) : nullptr,
      static_cast<float>(distance),
      static_cast<uint8_t*>(codes.data_ptr()), scale.data_ptr(), mean.data_ptr()};
  if (specache::quantize(in)) return {};
  return {codes, scale, mean};
}

// See runtime/session/token_history.py: of each row what followed the latest of the longest matches, and whether there is one.
// Rows have `most - 1` unknown tokens before the first, and `unknown` equals nothing.
std::tuple<Tensor, Tensor> following(Tensor rows, int64_t length, int64_t most, int64_t unknown) {
  STD_TORCH_CHECK(rows.dim() == 2 && rows.scalar_type() == ScalarType::Int && rows.stride(1) == 1 && length >= 0 &&
                      most > 0 && rows.size(1) >= length + most - 1,
                  "specache::following: rows are to be int32 [batch, most - 1 + length or more]");
  const int64_t batch = rows.size(0);
  const Tensor next = empty({batch}, rows), found = empty({batch}, aoti_torch_dtype_bool());
  for (int64_t b = 0; b < batch; b++) {
    const int32_t* const tokens = static_cast<const int32_t*>(rows.data_ptr()) + b * rows.stride(0) + most - 1;
    int64_t longest = 0, after = 0;
    for (int64_t end = length - 2; end >= 0 && longest < most; end--) {  // the last token of an n-gram
      if (tokens[end + 1] == unknown) continue;
      int64_t matched = 0;
      while (matched < most && tokens[end - matched] == tokens[length - 1 - matched] && tokens[end - matched] != unknown)
        matched++;
      if (matched > longest) longest = matched, after = end + 1;
    }
    static_cast<int32_t*>(next.data_ptr())[b] = longest > 0 ? tokens[after] : 0;
    static_cast<bool*>(found.data_ptr())[b] = longest > 0;
  }
  return {next, found};
}

// Of each row the sum of its words times factors, modulo 2^64.
Tensor row_sums(Tensor words, Tensor factors) {
  STD_TORCH_CHECK(words.dim() == 2 && factors.dim() == 1 && words.size(1) == factors.size(0) &&
                      words.scalar_type() == ScalarType::Long && factors.scalar_type() == ScalarType::Long &&
                      words.is_contiguous() && factors.is_contiguous(),
                  "specache::row_sums: words are to be int64 [rows, width], factors int64 [width]");
  const int64_t rows = words.size(0), width = words.size(1), threads = torch::stable::get_num_threads();
  const Tensor sums = empty({rows}, words);
  const uint64_t *word = static_cast<const uint64_t*>(words.data_ptr()),
                 *factor = static_cast<const uint64_t*>(factors.data_ptr());
  uint64_t* to = static_cast<uint64_t*>(sums.data_ptr());
  std::atomic<int64_t> next{0};
  specache::on_threads(std::min(threads, rows), [&](int64_t) {
    for (int64_t r = next++; r < rows; r = next++) {
      uint64_t sum = 0;
      for (int64_t i = 0; i < width; i++) sum += word[r * width + i] * factor[i];
      to[r] = sum;
    }
  });
  return sums;
}

}  // namespace

extern "C" {

// Of the OpenMP that torch has loaded; null where it has none.
__attribute__((weak)) void GOMP_parallel(void (*run)(void*), void* data, unsigned threads, unsigned flags);

// Whether GNU's OpenMP, which torch's own operators use, has threads that spin for microseconds behind each region, and
// not for milliseconds. No call says so. But they do where there are more of them than cores: one more sleeps here.
void specache_short_spins(bool wanted) {
  static std::mutex changing;
  static specache::Sleeper* sleeper = nullptr;
  static std::once_flag once;
  if (GOMP_parallel == nullptr) return;
  std::call_once(once, [] { pthread_atfork(nullptr, nullptr, [] { sleeper = nullptr; }); });  // its thread is not there
  const std::lock_guard<std::mutex> lock(changing);
  if (wanted == (sleeper != nullptr)) return;
  if (!wanted) {
    delete sleeper;
    sleeper = nullptr;
    return;
  }
  try {
    sleeper = new specache::Sleeper([] { GOMP_parallel([](void*) {}, nullptr, 2, 0); });
  } catch (const std::exception&) {  // no more threads: the spins stay long
  }
}

// Whoever loads an old build of another layout is to notice.
int64_t specache_session_size() { return sizeof(SpecacheSession); }
int64_t specache_layer_size() { return sizeof(SpecacheLayer); }

specache::Tape* specache_tape_new() { return new specache::Tape; }
void specache_tape_delete(specache::Tape* tape) { delete tape; }
// Whether a kernel of so many arguments can be noted.
bool specache_tape_kernel(specache::Tape* tape, const void* kernel, const int64_t* arguments, int64_t count) {
  if (count > specache::kMostArguments) return false;
  specache::add_kernel(*tape, kernel, arguments, count);
  return true;
}
}

// ops.py defines the others; transfers, fingerprints and tapes do not import it.
STABLE_TORCH_LIBRARY_FRAGMENT(specache, m) {
  m.def("row_sums(Tensor words, Tensor factors) -> Tensor");
  m.def("stage(Tensor table, int length, Tensor wanted, Tensor(a!) tokens, Tensor(b!) rows) -> int[]");
  m.def("select_topk(Tensor scores, int top_k, Tensor(a!) chosen) -> bool");
  m.def("count_overlap(Tensor scores, int top_k, Tensor positions, Tensor(a!) counts) -> bool");
  m.def("centred_codes(Tensor x, Tensor? balance, Tensor? counted, int bits, int group_size, float distance)"
        " -> Tensor[]");
  m.def("following(Tensor rows, int length, int most, int unknown) -> (Tensor, Tensor)");
  m.def("note_products(int tape, Tensor rows, Tensor[] weights, Tensor[] results) -> ()");
  m.def("note_layer_step(int tape, Tensor out, Tensor query, Tensor key, Tensor value, Tensor state, int layer,"
        " float scale, float? softcap=None, Tensor? sinks=None) -> ()");
  m.def("replay(int tape) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(specache, CPU, m) {
  m.impl("row_sums", TORCH_BOX(&row_sums));
  m.impl("stage", TORCH_BOX(&stage));
  m.impl("select_topk", TORCH_BOX(&select_topk));
  m.impl("count_overlap", TORCH_BOX(&count_overlap));
  m.impl("centred_codes", TORCH_BOX(&centred_codes));
  m.impl("following", TORCH_BOX(&following));
  m.impl("products.of1", TORCH_BOX(&Products<1>::run));
  m.impl("products.of2", TORCH_BOX(&Products<2>::run));
  m.impl("products.of3", TORCH_BOX(&Products<3>::run));
  m.impl("products.of4", TORCH_BOX(&Products<4>::run));
  m.impl("products.of5", TORCH_BOX(&Products<5>::run));
  m.impl("products.of6", TORCH_BOX(&Products<6>::run));
  m.impl("products.of7", TORCH_BOX(&Products<7>::run));
  m.impl("products.of8", TORCH_BOX(&Products<8>::run));
  m.impl("layer_step", TORCH_BOX(&specache::layer_step));
  m.impl("note_products", TORCH_BOX(&note_products));
  m.impl("note_layer_step", TORCH_BOX(&note_layer_step));
}

STABLE_TORCH_LIBRARY_IMPL(specache, CompositeExplicitAutograd, m) { m.impl("replay", TORCH_BOX(&replay)); }

// Operators that a graph calls on the CPU without Python between: `specache::products` (see native/graph_ops.py) and
// `specache::layer_step`. And `specache::stage`, the copy of that alone, and `specache::row_sums`, of fingerprints.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "layer_step.h"
#include "products.cpp"

namespace {

using specache::empty;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

void check(const Tensor& rows, const std::vector<Tensor>& weights) {
  const ScalarType dtype = rows.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::BFloat16,
                  "specache::products: rows are neither float32 nor bfloat16");
  const int64_t in = rows.dim() < 2 ? 0 : rows.size(-1);
  STD_TORCH_CHECK(in > 0, "specache::products: rows are to be [..., in]");
  for (const Tensor& weight : weights)
    STD_TORCH_CHECK(weight.dim() == 2 && weight.size(1) == in && weight.scalar_type() == dtype &&
                        weight.is_contiguous(),
                    "specache::products: a weight is to be [out, in], contiguous, of the dtype of the rows");
}

std::vector<Tensor> products(Tensor rows, std::vector<Tensor> weights) {
  check(rows, weights);
  std::vector<Tensor> results;
  results.reserve(weights.size());
  const int64_t in = rows.size(-1), num_rows = rows.numel() / in;
  if (num_rows < 1 || num_rows > kMaxRows) {
    for (const Tensor& weight : weights)
      results.push_back(torch::stable::matmul(rows, torch::stable::transpose(weight, 0, 1)));
    return results;
  }
  const Tensor packed = rows.is_contiguous() ? rows : torch::stable::contiguous(rows);
  SpecacheProducts p = {num_rows, in, rows.scalar_type() == ScalarType::BFloat16};
  p.threads = torch::stable::get_num_threads();
  p.rows = packed.data_ptr();
  std::vector<int64_t> shape;
  for (int64_t d = 0; d < rows.dim(); d++) shape.push_back(rows.size(d));
  for (size_t first = 0; first < weights.size(); first += kMaxWeights) {
    p.num_weights = std::min<int64_t>(weights.size() - first, kMaxWeights);
    for (int64_t i = 0; i < p.num_weights; i++) {
      const Tensor& weight = weights[first + i];
      p.weights[i] = weight.data_ptr();
      p.out[i] = weight.size(0);
      const Tensor result = empty({num_rows, p.out[i]}, rows);
      p.results[i] = result.data_ptr();
      shape.back() = p.out[i];
      results.push_back(rows.dim() == 2 ? result : torch::stable::view(result, shape));
    }
    specache_products(&p);
  }
  return results;
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
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows > 1)
  for (int64_t r = 0; r < rows; r++) {
    uint64_t sum = 0;
    for (int64_t i = 0; i < width; i++) sum += word[r * width + i] * factor[i];
    to[r] = sum;
  }
  return sums;
}

}  // namespace

extern "C" {

// Whoever loads an old build of another layout is to notice.
int64_t specache_session_size() { return sizeof(SpecacheSession); }
int64_t specache_layer_size() { return sizeof(SpecacheLayer); }
}

// ops.py defines the others; transfers and fingerprints do not import it.
STABLE_TORCH_LIBRARY_FRAGMENT(specache, m) {
  m.def("row_sums(Tensor words, Tensor factors) -> Tensor");
  m.def("stage(Tensor table, int length, Tensor wanted, Tensor(a!) tokens, Tensor(b!) rows) -> int[]");
}

STABLE_TORCH_LIBRARY_IMPL(specache, CPU, m) {
  m.impl("row_sums", TORCH_BOX(&row_sums));
  m.impl("stage", TORCH_BOX(&stage));
  m.impl("products", TORCH_BOX(&products));
  m.impl("layer_step", TORCH_BOX(&specache::layer_step));
}

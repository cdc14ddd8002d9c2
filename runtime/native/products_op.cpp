// `specache::products` on the CPU: called from a graph without Python between. See products.py for what it computes.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "products.cpp"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

void (*beside)() = nullptr;

Tensor empty(int64_t rows, int64_t columns, ScalarType dtype) {
  const int64_t sizes[] = {rows, columns}, strides[] = {columns, 1};
  const int32_t type = dtype == ScalarType::Float ? aoti_torch_dtype_float32() : aoti_torch_dtype_bfloat16();
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(2, sizes, strides, type, aoti_torch_device_type_cpu(), 0, &made));
  return Tensor(made);
}

template <class T>
void read(const Tensor& rows, float* to) {
  const T* from = static_cast<const T*>(rows.data_ptr());
  const int64_t width = rows.size(1);
  for (int64_t r = 0; r < rows.size(0); r++)
    for (int64_t c = 0; c < width; c++) to[r * width + c] = to_float(from[r * rows.stride(0) + c * rows.stride(1)]);
}

void check(const Tensor& rows, const std::vector<Tensor>& weights) {
  const ScalarType dtype = rows.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::BFloat16,
                  "specache::products: rows are neither float32 nor bfloat16");
  STD_TORCH_CHECK(rows.dim() == 2 && rows.size(0) >= 1 && rows.size(0) <= kMaxRows && rows.size(1) > 0,
                  "specache::products: rows are to be [1 to ", kMaxRows, ", in]");
  for (const Tensor& weight : weights)
    STD_TORCH_CHECK(weight.dim() == 2 && weight.size(1) == rows.size(1) && weight.scalar_type() == dtype &&
                        weight.is_contiguous(),
                    "specache::products: a weight is to be [out, in], contiguous, of the dtype of the rows");
}

std::vector<Tensor> products(Tensor rows, std::vector<Tensor> weights) {
  check(rows, weights);
  const bool half = rows.scalar_type() == ScalarType::BFloat16;
  SpecacheProducts p = {rows.size(0), rows.size(1), half};
  p.threads = torch::stable::get_num_threads();
  p.beside = beside;
  std::unique_ptr<float[]> floats;
  if (half || !rows.is_contiguous()) {
    floats.reset(new float[p.num_rows * p.in]);
    half ? read<Bfloat16>(rows, floats.get()) : read<float>(rows, floats.get());
  }
  p.rows = floats ? floats.get() : static_cast<const float*>(rows.data_ptr());
  std::vector<Tensor> results;
  results.reserve(weights.size());
  for (size_t first = 0; first < weights.size(); first += kMaxWeights) {
    p.num_weights = std::min<int64_t>(weights.size() - first, kMaxWeights);
    for (int64_t i = 0; i < p.num_weights; i++) {
      const Tensor& weight = weights[first + i];
      p.weights[i] = weight.data_ptr();
      p.out[i] = weight.size(0);
      results.push_back(empty(p.num_rows, p.out[i], rows.scalar_type()));
      p.results[i] = results.back().data_ptr();
    }
    specache_products(&p);
  }
  return results;
}

}  // namespace

// What threads do before their share of a product: see copies.cpp.
extern "C" void specache_do_beside(void (*function)()) { beside = function; }

STABLE_TORCH_LIBRARY_IMPL(specache, CPU, m) { m.impl("products", TORCH_BOX(&products)); }

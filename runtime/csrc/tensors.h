// Tensors of torch's stable ABI.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>

namespace specache {

using torch::stable::Tensor;

// A contiguous tensor on the CPU, of a dtype as `aoti_torch_dtype_...()` has it.
template <size_t DIMS>
Tensor empty(const int64_t (&sizes)[DIMS], int32_t dtype) {
  int64_t strides[DIMS], stride = 1;
  for (size_t i = DIMS; i-- > 0; stride *= sizes[i]) strides[i] = stride;
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(DIMS, sizes, strides, dtype, aoti_torch_device_type_cpu(), 0, &made));
  return Tensor(made);
}

// Likewise, of the dtype of `like`.
template <size_t DIMS>
Tensor empty(const int64_t (&sizes)[DIMS], const Tensor& like) {
  int32_t dtype;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like.get(), &dtype));
  return empty(sizes, dtype);
}

}  // namespace specache

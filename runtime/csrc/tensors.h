// Tensors of torch's stable ABI.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>

namespace specache {

using torch::stable::Tensor;

// A contiguous tensor on the CPU, of the dtype of `like`.
template <size_t DIMS>
Tensor empty(const int64_t (&sizes)[DIMS], const Tensor& like) {
  int64_t strides[DIMS], stride = 1;
  for (size_t i = DIMS; i-- > 0; stride *= sizes[i]) strides[i] = stride;
  int32_t dtype;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like.get(), &dtype));
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(DIMS, sizes, strides, dtype, aoti_torch_device_type_cpu(), 0, &made));
  return Tensor(made);
}

}  // namespace specache

// Operators that a graph calls on the CPU without Python between: `specache::products` (see graph_ops.py) and
// `specache::layer_step` (see plain_layers.py).
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <vector>

#include "products.cpp"

namespace {

using torch::headeronly::ScalarType;
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
      results.push_back(empty({p.num_rows, p.out[i]}, rows));
      p.results[i] = results.back().data_ptr();
    }
    specache_products(&p);
  }
  return results;
}

}  // namespace

extern "C" {

// A layer whose next step C++ can run. Mirrored in plain_layers.py.
struct SpecacheLayer {
  int64_t has_run;  // out
  int64_t lanes, batch, num_heads, num_kv_heads, key_dim, value_dim;
  int64_t dtype;  // as in inputs.h
  double scale, softcap;  // softcap: 0 for none
  // Where the step's arguments want the graph's tensors.
  const void **query, **key, **value, **sinks;
  void** out;
  int64_t (*step)(const void* inputs, const void* step);  // `specache_step` of attention.cpp
  const void *inputs, *rest;
  int64_t (*stage)(void* wanted_rows);  // `specache_stage` of copies.cpp: brings what was chosen
  void* wanted_rows;
  int64_t failed;  // out: what it returned
};

// Functions of Python's C interface, and what it is to call for a layer. Mirrored in graph_ops.py.
struct SpecachePython {
  int (*ensure)();
  void (*release)(int gil);
  void* (*call)(void* callable);
  void (*fetch)(void** type, void** error, void** traceback);
  void (*normalize)(void** type, void** error, void** traceback);
  int (*set_traceback)(void* error, void* traceback);
  void (*drop)(void* object);  // null is fine
  void* operators;
};

// Those of a session, by layer; null where there is none.
struct SpecacheLayers {
  int64_t state, num_layers;
  SpecacheLayer* const* layers;
};
}

namespace {

thread_local const SpecacheLayers* ready = nullptr;

SpecacheLayer* ready_layer(const Tensor& state, int64_t layer) {
  if (ready == nullptr || *static_cast<const int64_t*>(state.data_ptr()) != ready->state) return nullptr;
  return layer < ready->num_layers ? ready->layers[layer] : nullptr;
}

int64_t dtype_of(const Tensor& x) {
  const ScalarType type = x.scalar_type();
  return type == ScalarType::Float ? 0 : type == ScalarType::BFloat16 ? 1 : type == ScalarType::Half ? 2 : -1;
}

bool is(const Tensor& x, const SpecacheLayer& layer, int64_t heads, int64_t dim) {
  return x.dim() == 5 && x.size(0) == layer.lanes && x.size(1) == layer.batch && x.size(2) == heads && x.size(3) == 1 &&
         x.size(4) == dim && dtype_of(x) == layer.dtype && x.stride(4) == 1;
}

// Of what `is` has let through, the rows one behind the other: parts of a fused projection lie apart.
Tensor packed(const Tensor& x) {
  if (x.is_contiguous()) return x;
  const int64_t sizes[] = {x.size(0), x.size(1), x.size(2), 1, x.size(4)};
  const int64_t size = dtype_of(x) == 0 ? 4 : 2, row = sizes[4] * size;
  Tensor out = empty(sizes, x);
  char* to = static_cast<char*>(out.data_ptr());
  const char* const from = static_cast<const char*>(x.data_ptr());
  for (int64_t lane = 0; lane < sizes[0]; lane++)
    for (int64_t batch = 0; batch < sizes[1]; batch++)
      for (int64_t head = 0; head < sizes[2]; head++, to += row)
        memcpy(to, from + (lane * x.stride(0) + batch * x.stride(1) + head * x.stride(2)) * size, row);
  return out;
}

// A layer that Python is asked to do.
struct Call {
  const Tensor &query, &key, &value, &state;
  int64_t layer;
  double scale;
  const std::optional<double>& softcap;
  const std::optional<Tensor>& sinks;
  const std::optional<int64_t>&expansion, &value_dim;
  std::optional<Tensor> out;
};

const SpecachePython* python = nullptr;
thread_local Call* pending = nullptr;
thread_local void* failure = nullptr;  // the error of Python's that a call ended with

void keep_failure() {
  void *type = nullptr, *error = nullptr, *traceback = nullptr;
  python->fetch(&type, &error, &traceback);
  python->normalize(&type, &error, &traceback);
  if (traceback != nullptr) python->set_traceback(error, traceback);
  python->drop(failure);
  failure = error;
  python->drop(type);
  python->drop(traceback);
}

// By Python's own interface: of an error the dispatcher would leave no more than the text. What is called could not keep
// all errors itself: a signal's handler may raise before its first line.
Tensor by_operators(Call call) {
  STD_TORCH_CHECK(python != nullptr && python->operators != nullptr, "specache::layer_step: Python isn't known");
  Call* const outer = pending;
  pending = &call;
  const int gil = python->ensure();
  void* const result = python->call(python->operators);
  if (result == nullptr) keep_failure();
  python->drop(result);
  python->release(gil);
  pending = outer;
  STD_TORCH_CHECK(result != nullptr && call.out, "a layer's operators failed; DecodeStep.running raises their error");
  return *call.out;
}

void layer_arguments(StableIValue* stack, uint64_t, uint64_t) {
  using torch::stable::detail::from;
  torch::stable::detail::to<Tensor>(stack[0]);
  STD_TORCH_CHECK(pending != nullptr, "specache::layer_arguments: no layer is asked for");
  const Call& call = *pending;
  const StableIValue arguments[] = {from(call.query), from(call.key),     from(call.value), from(call.state),
                                    from(call.layer), from(call.scale),   from(call.softcap), from(call.sinks),
                                    from(call.expansion), from(call.value_dim)};
  std::copy(std::begin(arguments), std::end(arguments), stack);
}

void layer_result(Tensor out) {
  STD_TORCH_CHECK(pending != nullptr, "specache::layer_result: no layer is asked for");
  pending->out = out;
}

Tensor layer_step(Tensor query, Tensor key, Tensor value, Tensor state, int64_t layer, double scale,
                  std::optional<double> softcap, std::optional<Tensor> sinks, std::optional<int64_t> expansion,
                  std::optional<int64_t> value_dim) {
  SpecacheLayer* const own = ready_layer(state, layer);
  STD_TORCH_CHECK(own == nullptr || !own->has_run, "specache::layer_step: twice for layer ", layer, " in a step");
  const bool plain = own != nullptr && is(query, *own, own->num_heads, own->key_dim) &&
                     is(key, *own, own->num_kv_heads, own->key_dim) &&
                     is(value, *own, own->num_kv_heads, own->value_dim) && scale == own->scale &&
                     softcap.value_or(0) == own->softcap && !expansion &&
                     (!sinks || (sinks->is_contiguous() && (dtype_of(*sinks) == 0 || dtype_of(*sinks) == 1)));
  if (plain) {
    Tensor out = empty({own->lanes, own->batch, own->num_heads, 1, own->value_dim}, query);
    const Tensor own_query = packed(query), own_key = packed(key), own_value = packed(value);
    *own->query = own_query.data_ptr();
    *own->key = own_key.data_ptr();
    *own->value = own_value.data_ptr();
    std::vector<float> floats;
    *own->sinks = sinks ? sinks->data_ptr() : nullptr;
    if (sinks && dtype_of(*sinks) == 1) {
      const Bfloat16* from = static_cast<const Bfloat16*>(sinks->data_ptr());
      for (int64_t i = 0; i < sinks->numel(); i++) floats.push_back(to_float(from[i]));
      *own->sinks = floats.data();
    }
    *own->out = out.data_ptr();
    // Without memory nothing has changed, and the operators say so.
    if (own->step(own->inputs, own->rest) == 0) {
      own->has_run = 1;
      own->failed = own->stage(own->wanted_rows);
      return out;
    }
  }
  return by_operators({query, key, value, state, layer, scale, softcap, sinks, expansion, value_dim, {}});
}

}  // namespace

extern "C" {

int64_t specache_layer_size() { return sizeof(SpecacheLayer); }

void specache_use_python(const SpecachePython* functions) { python = functions; }

// What `layer_step` failed with on this thread, the caller's own; null for nothing.
void* specache_take_failure() {
  void* const taken = failure;
  failure = nullptr;
  return taken;
}

// Layers of the step that this thread runs next; null for none.
void specache_get_ready(const SpecacheLayers* layers) { ready = layers; }
}

STABLE_TORCH_LIBRARY_IMPL(specache, CPU, m) {
  m.impl("products", TORCH_BOX(&products));
  m.impl("layer_step", TORCH_BOX(&layer_step));
  m.impl("layer_arguments", &layer_arguments);
  m.impl("layer_result", TORCH_BOX(&layer_result));
}

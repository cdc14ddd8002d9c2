// A layer's decode step on the CPU, all of it: `specache::layer_step`. The tensor `state` tells it what to do; see
// runtime/steps/step_table.py.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <chrono>
#include <cstring>
#include <vector>

#include "inputs.h"
#include "selection.h"
#include "stage.h"
#include "tensors.h"
#include "vec.h"

extern "C" {

// Of all layers of a session. Mirrored in step_table.py.
struct SpecacheSession {
  int64_t number;
  int64_t num_selectable;  // tokens that may be prefetched: those that are quantised once the step is through
  int64_t scored_lanes, threads;
  int64_t predecodes;  // none is staged, and the lanes don't see each other
  int64_t written;     // lanes whose own pairs are written behind the window; 0 in pre-decode
  int64_t stages;      // whether the rows that are chosen are brought at once
  int64_t is_timed;
  int64_t selects_first;  // the step's own scores choose its pairs: attention runs twice
  float* scores;            // [scored_lanes, batch, kv_heads, stored + 1] of any layer
  const uint8_t* key_mask;  // [batch, stored]; null where all are real
  const float* shares;      // see inputs.h
  const uint8_t* missed;    // [batch]: rows that choose, the others keep what is staged; null for all
  double* counts;           // [batch, 4], see `count_overlap`; null where nobody counts
  int64_t (*attention)(const SpecacheInputs*);  // `specache_attention` of attention.cpp
  int64_t failed;  // out: why a layer didn't come to its end; see `specache::Failure`
  int64_t fetched_rows, fetched_bytes, kept_rows, kept_bytes;  // out: of all copies, added up
  double copy_seconds;                                         // out: likewise
};

enum Status : int64_t { kNotToRun = 0, kToRun = 1, kHasRun = 2 };

constexpr int kParts = 4;  // attention, selection, append, copy; or attention, selection, copy, attention with append

// One of its layers. Mirrored in step_table.py.
struct SpecacheLayer {
  int64_t status;            // see Status; in and out
  int64_t selects;           // pairs are chosen and staged
  int64_t num_quantized;     // tokens before the step: in codes, and in the window
  int64_t window_len;
  double times[kParts + 1];  // out, where they are wanted: seconds at which the parts began, and the end
  SpecacheInputs inputs;     // what outlasts a step, and its bias
  int32_t* wanted;           // [batch, kv_heads, num_staged]
};
}

namespace specache {

using torch::headeronly::ScalarType;

inline int64_t dtype_of(const Tensor& x) {
  switch (x.scalar_type()) {
    case ScalarType::Float: return kFloat32;
    case ScalarType::BFloat16: return kBFloat16;
    case ScalarType::Half: return kFloat16;
    default: return -1;  // of no cache
  }
}

// The rows one behind the other: parts of a fused projection lie apart.
inline Tensor packed(const Tensor& x) {
  if (x.is_contiguous()) return x;
  if (x.stride(4) != 1) return torch::stable::contiguous(x);
  const int64_t sizes[] = {x.size(0), x.size(1), x.size(2), 1, x.size(4)};
  const int64_t size = bytes_of(dtype_of(x)), row = sizes[4] * size;
  Tensor out = empty(sizes, x);
  char* to = static_cast<char*>(out.data_ptr());
  const char* const from = static_cast<const char*>(x.data_ptr());
  for (int64_t lane = 0; lane < sizes[0]; lane++)
    for (int64_t batch = 0; batch < sizes[1]; batch++)
      for (int64_t head = 0; head < sizes[2]; head++, to += row)
        memcpy(to, from + (lane * x.stride(0) + batch * x.stride(1) + head * x.stride(2)) * size, row);
  return out;
}

inline std::vector<float> floats_of(const Tensor& x) {
  const Tensor whole = x.is_contiguous() ? x : torch::stable::contiguous(x);
  std::vector<float> floats(whole.numel());
  to_float(floats.data(), whole.data_ptr(), whole.numel(), dtype_of(whole));
  return floats;
}

// The own pairs of the first `lanes` lanes are written behind the window's last one.
inline void write_pairs(const SpecacheInputs& in, int64_t lanes) {
  const struct {
    const SpecachePlane& window;
    const void* own;
    int64_t bytes;
  } sides[] = {{in.window_key, in.own_key, in.key_dim * bytes_of(in.dtype)},
               {in.window_value, in.own_value, in.value_dim * bytes_of(in.dtype)}};
  for (const auto& side : sides) {
    const char* from = static_cast<const char*>(side.own);
    for (int64_t lane = 0; lane < lanes; lane++)
      for (int64_t row = 0; row < in.batch * in.kv_heads; row++, from += side.bytes) {
        const int64_t head = row / in.kv_heads * side.window.batch_stride + row % in.kv_heads * side.window.head_stride;
        char* const to = static_cast<char*>(const_cast<void*>(side.window.data)) + head * bytes_of(in.dtype);
        memcpy(to + (in.window_len + lane) * side.bytes, from, side.bytes);
      }
  }
}

// Batch rows that didn't miss ask for what is staged.
inline void keep_staged(const SpecacheSession& session, const SpecacheLayer& layer) {
  const int64_t size = layer.inputs.kv_heads * layer.inputs.num_staged;
  for (int64_t row = 0; session.missed != nullptr && row < layer.inputs.batch; row++)
    if (!session.missed[row]) memcpy(layer.wanted + row * size, layer.inputs.staged_indices + row * size, 4 * size);
}

inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline Slots slots_of(const SpecacheLayer& layer) {
  const SpecacheInputs& in = layer.inputs;
  return {in.batch * in.kv_heads,
          in.num_staged,
          (in.key_dim + in.value_dim) * bytes_of(in.dtype),
          layer.wanted,
          const_cast<int32_t*>(in.staged_indices),
          static_cast<uint8_t*>(const_cast<void*>(in.staged_rows.data))};
}

// Brings the rows that a layer wants to their slots, and counts them.
inline int64_t bring(SpecacheSession& session, const SpecacheInputs& in, const Slots& slots) {
  const double start = now();
  const Staged done = stage({in.host, in.host_length}, slots);
  if (done.failure) return done.failure;
  session.fetched_rows += done.fetched;
  session.fetched_bytes += done.fetched * slots.row_bytes;
  session.kept_rows += done.kept;
  session.kept_bytes += done.kept * slots.row_bytes;
  session.copy_seconds += now() - start;
  return kNoFailure;
}

// A step whose pairs are those of its own largest scores.
template <class Mark>
int64_t run_twice(SpecacheSession& session, SpecacheLayer& layer, SpecacheInputs in, const Mark& mark) {
  const Slots slots = slots_of(layer);
  const int64_t heads = in.batch * in.kv_heads, stride = in.num_quantized + in.window_len + 1;
  SpecacheInputs first = in;
  first.num_staged = 0;
  mark(0);
  if (session.attention(&first)) return kNoMemory;
  mark(1);
  if (select_topk(in.scores, heads, stride, in.num_quantized, slots.top_k, layer.wanted, in.threads)) return kNoMemory;
  mark(2);
  if (const int64_t failure = bring(session, in, slots)) return failure;
  mark(3);
  in.scored_lanes = 0;
  if (session.attention(&in)) return kNoMemory;
  write_pairs(in, session.written);
  layer.status = kHasRun;
  mark(kParts);
  return kNoFailure;
}

inline int64_t run(SpecacheSession& session, SpecacheLayer& layer, const SpecacheInputs& in) {
  const auto mark = [&](int part) {
    if (session.is_timed) layer.times[part] = now();
  };
  if (layer.selects && session.selects_first) return run_twice(session, layer, in, mark);
  const Slots slots = slots_of(layer);
  if (in.chooses && in.num_quantized > in.host_length) return kNotOnHost;
  mark(0);
  if (session.attention(&in)) return kNoMemory;
  mark(1);
  if (!layer.selects) {
    mark(2);
    write_pairs(in, session.written);
    layer.status = kHasRun;
    mark(3);
    mark(kParts);
    return kNoFailure;
  }
  const int64_t heads = in.batch * in.kv_heads, stride = in.num_quantized + in.window_len + 1;
  const float* const last = in.scores + (in.scored_lanes - 1) * heads * stride;
  if (select_topk(last, heads, stride, session.num_selectable, slots.top_k, layer.wanted, in.threads)) return kNoMemory;
  if (session.counts != nullptr && in.num_staged > 0 &&
      count_overlap(in.scores, in.batch, in.kv_heads, stride, in.num_quantized, slots.top_k, slots.tokens, slots.top_k,
                    session.counts, in.threads))
    return kNoMemory;
  keep_staged(session, layer);
  mark(2);
  write_pairs(in, session.written);
  layer.status = kHasRun;
  mark(3);
  if (session.stages)
    if (const int64_t failure = bring(session, in, slots)) return failure;
  mark(kParts);
  return kNoFailure;
}

// `out` is [lanes, batch, num_heads, 1, value_dim], contiguous; the others are as `specache.layer_step` has them.
inline void layer_step_into(const Tensor& out, const Tensor& query, const Tensor& key, const Tensor& value,
                            const Tensor& state, int64_t index, double scale, std::optional<double> softcap,
                            const std::optional<Tensor>& sinks) {
  auto& session = *static_cast<SpecacheSession*>(state.data_ptr());
  auto& layer = reinterpret_cast<SpecacheLayer*>(&session + 1)[index];
  const int64_t known = (state.numel() * 8 - static_cast<int64_t>(sizeof(session))) / static_cast<int64_t>(sizeof(layer));
  STD_TORCH_CHECK(index >= 0 && index < known && layer.status != kNotToRun, "specache::layer_step: layer ", index,
                  " is not to run now");
  STD_TORCH_CHECK(layer.status == kToRun, "specache::layer_step: twice for layer ", index, " in a step");
  SpecacheInputs in = layer.inputs;
  const struct {
    const Tensor& x;
    int64_t heads, dim;
  } sides[] = {{query, query.size(2), in.key_dim}, {key, in.kv_heads, in.key_dim}, {value, in.kv_heads, in.value_dim}};
  for (const auto& [x, heads, dim] : sides)
    STD_TORCH_CHECK(x.dim() == 5 && x.size(0) == query.size(0) && x.size(1) == in.batch && x.size(2) == heads &&
                        x.size(3) == 1 && x.size(4) == dim && dtype_of(x) == in.dtype,
                    "specache::layer_step: query, key or value is not what layer ", index, " has");
  const Tensor own_query = packed(query), own_key = packed(key), own_value = packed(value);
  const std::vector<float> sink_scores = sinks ? floats_of(*sinks) : std::vector<float>();
  in.lanes = query.size(0);
  in.heads_per_kv = query.size(2) / in.kv_heads;
  in.scale = static_cast<float>(scale);
  in.softcap = static_cast<float>(softcap.value_or(0));
  in.query = own_query.data_ptr();
  in.own_key = own_key.data_ptr();
  in.own_value = own_value.data_ptr();
  in.sinks = sinks ? sink_scores.data() : nullptr;
  in.out = out.data_ptr();
  in.num_quantized = layer.num_quantized;
  in.window_len = layer.window_len;
  if (in.num_quantized == 0) in.centred = 0;  // no codes, and no means of theirs
  if (session.predecodes || in.num_quantized == 0) in.num_staged = 0;
  in.independent_lanes = session.predecodes;
  in.scored_lanes = !layer.selects ? 0 : session.scored_lanes < in.lanes ? session.scored_lanes : in.lanes;
  in.threads = session.threads;
  in.scores = session.scores;
  in.key_mask = in.visible == nullptr ? session.key_mask : nullptr;
  in.shares = layer.selects ? session.shares : nullptr;
  session.failed = run(session, layer, in);
  STD_TORCH_CHECK(session.failed != kNoMemory, "specache::layer_step: there is no memory for layer ", index);
  STD_TORCH_CHECK(!session.failed, "specache::layer_step: layer ", index, " wants a token that is not on the host");
}

inline Tensor layer_step(Tensor query, Tensor key, Tensor value, Tensor state, int64_t index, double scale,
                         std::optional<double> softcap, std::optional<Tensor> sinks) {
  STD_TORCH_CHECK(query.dim() == 5 && value.dim() == 5, "specache::layer_step: query and value are to be 5-D");
  const Tensor out = empty({query.size(0), query.size(1), query.size(2), 1, value.size(4)}, query);
  layer_step_into(out, query, key, value, state, index, scale, softcap, sinks);
  return out;
}

}  // namespace specache

// What Python hands over: `DecodeInputs` of runtime/kernels/base.py as plain numbers and addresses. Mirrored in abi.py.
#pragma once

#include <cstdint>

extern "C" {

// A tensor [batch, kv_heads, rows, width] whose rows lie one behind the other; strides in elements.
struct SpecachePlane {
  const void* data;
  int64_t batch_stride, head_stride;
};

struct SpecacheInputs {
  int64_t dtype;  // of all but codes, indices, masks, bias and sinks: see Dtype in vec.h
  int64_t bits, group_size, value_group;  // tokens of a key's group; channels of a value's
  int64_t centred;  // codes are `TurboQuantizer`'s: scales by token, zeros (means) by channel, both of rotated pairs
  int64_t lanes, batch, kv_heads, heads_per_kv, key_dim, value_dim;
  int64_t num_quantized, window_len, num_staged;
  int64_t staged_heads;  // kv heads that `staged_indices` tells apart: all, or 1 for sinks
  int64_t independent_lanes, threads;
  int64_t scored_lanes, max_of_heads;  // the last so many; 0: the mean of a group's heads
  int64_t chooses;  // pairs of the host are read in the same step, see same_step.h
  int64_t bias_lane_stride, bias_batch_stride, bias_head_stride;
  float scale, softcap;  // softcap: 0 for none
  float tolerance;       // of a score (rms): how far factors of one byte may be off; 0: always two bytes
  float key_share, value_share;  // of `chooses`
  const void *query, *own_key, *own_value;  // [lanes, batch, heads, dim]
  SpecachePlane key_codes, key_scale, key_zero, value_codes, value_scale, value_zero;
  SpecachePlane key_balance;  // of centred codes: what queries are multiplied by before their rotation
  SpecachePlane window_key, window_value, staged_rows;
  const int32_t* staged_indices;  // [batch, staged_heads, num_staged]
  const uint8_t* key_mask;        // [batch, stored]; null where all are real
  const uint8_t* visible;         // [lanes, batch, stored + lanes]; null for key_mask and the lanes' rule
  const float* bias;              // [lanes, batch or 1, heads or 1, stored + lanes]; null for none
  const float* sinks;             // [heads]; null for none
  void* out;                      // [lanes, batch, heads, value_dim]
  float* scores;                  // [scored_lanes, batch, kv_heads, stored + 1]
  const float* shares;            // [batch], of two lanes: what the last one's scores weigh in its own row, beside the
                                  // first one's; null for all
  const int64_t* host;            // the 16-bit originals of what is in codes: see `specache::HostRows`, as the next
  int64_t host_length;
  int64_t* num_read;              // [2], added to: keys and values that `chooses` has read
};
}

// What bringing rows from the host to a layer's slots needs, and what it says. Mirrored in native/copies.py.
#pragma once

#include <cstdint>

extern "C" struct SpecacheStage {
  int64_t rows, top_k, row_bytes;  // `rows`: batch rows times kv heads
  int64_t length, num_blocks;      // tokens on the host
  const uint8_t* const* blocks;    // [rows][tokens of the block][row_bytes] each
  const int64_t* starts;           // [num_blocks + 1]: first tokens of the blocks, and the end of the last
  int32_t* wanted;                 // [rows][top_k]
  int32_t* slots;                  // [rows][top_k]: which tokens are staged
  uint8_t* staged;                 // [rows][top_k][row_bytes]
  int64_t fetched, kept;           // out: rows that were copied, rows that were there
  double seconds;                  // out: what it took
};

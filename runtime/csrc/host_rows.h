// The 16-bit pairs of a layer on the host, where they lie.
#pragma once

#include <algorithm>
#include <cstdint>

namespace specache {

// A layer's rows on the host. `table` is `HostCache.table`: the number of blocks, then each block's first token and its
// address, then one past the last token.
struct HostRows {
  struct Block {
    int64_t start;
    const uint8_t* rows;  // [batch * kv_heads][tokens of the block][row_bytes]
  };
  const int64_t* table;
  int64_t length;  // tokens that the host holds

  const uint8_t* row(int64_t row, int64_t token, int64_t row_bytes) const {
    const Block* const blocks = reinterpret_cast<const Block*>(table + 1);
    const auto is_before = [](int64_t at, const Block& block) { return at < block.start; };
    const Block* const block = std::upper_bound(blocks + 1, blocks + table[0], token, is_before) - 1;
    return block->rows + (row * (block[1].start - block->start) + token - block->start) * row_bytes;
  }
};

}  // namespace specache

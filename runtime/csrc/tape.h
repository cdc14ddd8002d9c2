// The calls of a decode step, noted once and made again without Python between: `specache::replay`. See
// runtime/steps/cpu_recorder.py.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace specache {

struct Tape {
  std::vector<std::function<void()>> calls;
};

constexpr int64_t kMostArguments = 96;

// A kernel of Inductor's takes addresses and 64-bit integers alone: in registers and on the stack they are passed alike.
template <size_t... I>
void launch(const void* kernel, const int64_t* arguments, std::index_sequence<I...>) {
  reinterpret_cast<void (*)(decltype(static_cast<void>(I), int64_t{})...)>(const_cast<void*>(kernel))(arguments[I]...);
}

using Launch = void (*)(const void*, const int64_t*);

template <size_t... COUNTS>
constexpr std::array<Launch, sizeof...(COUNTS)> launches(std::index_sequence<COUNTS...>) {
  return {[](const void* kernel, const int64_t* arguments) {
    launch(kernel, arguments, std::make_index_sequence<COUNTS>{});
  }...};
}

// Notes a kernel's launch.
inline void add_kernel(Tape& tape, const void* kernel, const int64_t* arguments, int64_t count) {
  static constexpr auto by_count = launches(std::make_index_sequence<kMostArguments + 1>{});
  tape.calls.push_back([launch = by_count[count], kernel, kept = std::vector<int64_t>(arguments, arguments + count)] {
    launch(kernel, kept.data());
  });
}

}  // namespace specache

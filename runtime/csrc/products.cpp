// A few rows times weights, at the speed at which the weights can be read: decoding is bound by that, and BLAS packs
// the weight first or takes one row at a time. See passes/few_row_products.py.
#include <atomic>
#include <memory>

#include "amx.h"
#include "crew.h"
#include "vec.h"

extern "C" {

constexpr int kMaxRows = 32, kMaxWeights = 8;

struct SpecacheProducts {
  int64_t num_rows, in, bfloat16;  // 1 to kMaxRows rows; they and the results are in bfloat16, or in float32
  int64_t int8;                    // weights are int8; else in the rows' dtype
  int64_t num_weights, threads;
  const void* rows;                  // [num_rows][in]
  const void* weights[kMaxWeights];  // [out[i]][in] each
  int64_t out[kMaxWeights];
  void* results[kMaxWeights];        // [num_rows][out[i]] each
};
}

namespace specache {

constexpr int kPassRows = 8;                      // multiplied at once; sums of more don't fit in registers
constexpr int64_t kNearBytes = 24 << 10;          // of input rows that stay in L1 beside the weights
constexpr int64_t kMostTaskBytes = 1 << 17;       // of weights, or a few rows: they stay near for each pass
constexpr int64_t kLeastTaskBytes = 1 << 14, kTasksAThread = 8;

// How a weight and rows are multiplied: `kStep` of their elements at once, into sums of float32.
struct Float32 {
  typedef float Weight;
  typedef float Row;
  typedef Floats Piece;
  static constexpr int kStep = kLanes;
  static constexpr Dtype kResult = kFloat32;
  static Piece weight(const float* from) { return load_floats(from); }
  static Piece row(const float* from) { return load_floats(from); }
  static Floats add(Floats sums, Piece weight, Piece row) { return sums + weight * row; }
  static float product(float weight, float row) { return weight * row; }
};

// Weights in bfloat16, rows that were widened to float32.
struct Widened : Float32 {
  typedef uint16_t Weight;
  static constexpr Dtype kResult = kBFloat16;
  static Piece weight(const uint16_t* from) {
    return (Floats)(__builtin_convertvector(load<HalfVector>(from), Ints) << 16);
  }
  static float product(uint16_t weight, float row) { return bits_to_float(uint32_t{weight} << 16) * row; }
};

// Weights in int8, without their scales; rows in float32, or widened to it. The results' dtype is a constant: asked
// for at each store, it takes 1% of products of 1,024 elements, and 7% of those of 64.
template <Dtype RESULT>
struct Int8 : Float32 {
  typedef int8_t Weight;
  static constexpr Dtype kResult = RESULT;
  static Piece weight(const int8_t* from) { return to_floats(load_bytes(from)); }
  static float product(int8_t weight, float row) { return static_cast<float>(weight) * row; }
};

#if defined(__AVX512BF16__)
// Both in bfloat16, multiplied in pairs.
struct Pairs {
  typedef uint16_t Weight;
  typedef uint16_t Row;
  typedef __m512bh Piece;
  static constexpr int kStep = 2 * kLanes;
  static constexpr Dtype kResult = kBFloat16;
  static Piece weight(const uint16_t* from) { return (__m512bh)load<Ints>(from); }
  static Piece row(const uint16_t* from) { return weight(from); }
  static Floats add(Floats sums, Piece weight, Piece row) { return _mm512_dpbf16_ps(sums, weight, row); }
  static float product(uint16_t weight, uint16_t row) {
    return Widened::product(weight, bits_to_float(uint32_t{row} << 16));
  }
};
#endif

// With few input rows a thread waits for memory. It then reads rows of the weight that lie far apart: each is a stream in
// pages of its own, which the processor prefetches. With more it reads neighbours, which share pages. The processor finds
// no stream there, so we prefetch.
constexpr int kMostRowsOfStreams = 4;

// COUNT rows of the weight, `apart` rows from one to the next, times ROWS rows of `rows`. With few sums, there are several
// of each, so that no addition waits for the one before.
template <class How, int ROWS, int COUNT>
inline void times(const typename How::Row* rows, const typename How::Weight* weight, int64_t in, int64_t apart, void* out,
                  int64_t at, int64_t out_stride) {
  constexpr int kSums = ROWS * COUNT == 1 ? 4 : ROWS * COUNT <= 8 ? 2 : 1, kStep = How::kStep;
  Floats sums[ROWS][COUNT][kSums] = {};
  int64_t c = 0;
  for (; c + kSums * kStep <= in; c += kSums * kStep)
    for (int i = 0; i < kSums; i++) {
      typename How::Piece w[COUNT];
      for (int n = 0; n < COUNT; n++) {
        w[n] = How::weight(weight + n * apart * in + c + i * kStep);
        if (ROWS > kMostRowsOfStreams) __builtin_prefetch(weight + (COUNT + n) * in + c + i * kStep, 0, 2);
      }
      for (int r = 0; r < ROWS; r++) {
        const typename How::Piece x = How::row(rows + r * in + c + i * kStep);
        for (int n = 0; n < COUNT; n++) sums[r][n][i] = How::add(sums[r][n][i], w[n], x);
      }
    }
  for (; c + kStep <= in; c += kStep)
    for (int r = 0; r < ROWS; r++)
      for (int n = 0; n < COUNT; n++)
        sums[r][n][0] = How::add(sums[r][n][0], How::weight(weight + n * apart * in + c), How::row(rows + r * in + c));
  for (int r = 0; r < ROWS; r++)
    for (int n = 0; n < COUNT; n++) {
      for (int i = 1; i < kSums; i++) sums[r][n][0] += sums[r][n][i];
      float total = sum(sums[r][n][0]);
      for (int64_t rest = c; rest < in; rest++) total += How::product(weight[n * apart * in + rest], rows[r * in + rest]);
      from_float(out, at + r * out_stride + n * apart, total, How::kResult);
    }
}

// Rows of the weight at a time: reading `rows` for each takes as long as reading the weight. Sums, those rows' parts and
// the weight's are to fit in registers.
constexpr int count_of(int rows) {
  const int most = (kLanes == 16 ? 24 : 12) / rows, wanted = rows <= kMostRowsOfStreams && kLanes == 16 ? 8 : 4;
  return most < wanted ? most : wanted;
}

// Outputs `first` to `end` of one weight.
template <class How, int ROWS>
void pass(const typename How::Row* rows, const typename How::Weight* weight, int64_t in, int64_t first, int64_t end,
          void* out, int64_t at, int64_t out_stride) {
  constexpr int COUNT = count_of(ROWS);
  constexpr bool kStreams = ROWS <= kMostRowsOfStreams;
  const int64_t turns = (end - first) / COUNT;
  for (int64_t turn = 0; turn < turns; turn++) {
    const int64_t o = first + turn * (kStreams ? 1 : COUNT);
    times<How, ROWS, COUNT>(rows, weight + o * in, in, kStreams ? turns : 1, out, at + o, out_stride);
  }
  for (int64_t o = first + turns * COUNT; o < end; o++)
    times<How, ROWS, 1>(rows, weight + o * in, in, 1, out, at + o, out_stride);
}

template <class How>
void passes(const typename How::Row* rows, int64_t num_rows, const typename How::Weight* weight, int64_t in, int64_t first,
            int64_t end, void* out, int64_t out_stride) {
  const int64_t most = num_rows < kPassRows ? num_rows : kPassRows;
  const bool are_near = most * in * static_cast<int64_t>(sizeof(typename How::Row)) <= kNearBytes;
  const int64_t at_once = are_near ? kPassRows : kMostRowsOfStreams;
  for (int64_t r = 0; r < num_rows; r += at_once) {
    const typename How::Row* from = rows + r * in;
    const int64_t at = r * out_stride, left = num_rows - r;
    switch (left < at_once ? left : at_once) {
      case 1: pass<How, 1>(from, weight, in, first, end, out, at, out_stride); break;
      case 2: pass<How, 2>(from, weight, in, first, end, out, at, out_stride); break;
      case 3: pass<How, 3>(from, weight, in, first, end, out, at, out_stride); break;
      case 4: pass<How, 4>(from, weight, in, first, end, out, at, out_stride); break;
      case 5: pass<How, 5>(from, weight, in, first, end, out, at, out_stride); break;
      case 6: pass<How, 6>(from, weight, in, first, end, out, at, out_stride); break;
      case 7: pass<How, 7>(from, weight, in, first, end, out, at, out_stride); break;
      default: pass<How, kPassRows>(from, weight, in, first, end, out, at, out_stride);
    }
  }
}

// Calls `part(i, first, end)` for all outputs of each weight i, `multiple` of them at a time or more, on all threads.
template <class Part>
void share_out(const SpecacheProducts& p, int64_t multiple, const Part& part) {
  const int64_t row_bytes = p.in * (p.int8 ? 1 : p.bfloat16 ? 2 : 4);
  int64_t outs = 0, num_tasks = 0, starts[kMaxWeights];
  for (int64_t i = 0; i < p.num_weights; i++) outs += p.out[i];
  int64_t bytes = outs * row_bytes / (p.threads * kTasksAThread);
  bytes = bytes < kLeastTaskBytes ? kLeastTaskBytes : bytes < kMostTaskBytes ? bytes : kMostTaskBytes;
  const int64_t per_task = round_up(bytes / row_bytes + 1, multiple);
  for (int64_t i = 0; i < p.num_weights; i++) {
    starts[i] = num_tasks;
    num_tasks += (p.out[i] + per_task - 1) / per_task;
  }
  const int64_t threads = num_tasks < 4 ? 1 : num_tasks / 2 < p.threads ? num_tasks / 2 : p.threads;
  std::atomic<int64_t> next{0};
  on_threads(threads, [&](int64_t) {
    for (int64_t task = next++; task < num_tasks; task = next++) {
      int64_t i = p.num_weights - 1;
      while (starts[i] > task) i--;
      const int64_t first = (task - starts[i]) * per_task, end = first + per_task;
      part(i, first, end < p.out[i] ? end : p.out[i]);
    }
  });
}

template <class How>
void multiply(const SpecacheProducts& p, const typename How::Row* rows) {
  share_out(p, 24, [&](int64_t i, int64_t first, int64_t end) {  // a multiple of each `count_of`
    passes<How>(rows, p.num_rows, static_cast<const typename How::Weight*>(p.weights[i]), p.in, first, end, p.results[i],
                p.out[i]);
  });
}

inline std::unique_ptr<float[]> widened(const SpecacheProducts& p) {
  std::unique_ptr<float[]> floats(new float[p.num_rows * p.in]);
  to_float(floats.get(), p.rows, p.num_rows * p.in, kBFloat16);
  return floats;
}

inline void multiply_bfloat16(const SpecacheProducts& p) {
  const uint16_t* rows = static_cast<const uint16_t*>(p.rows);
#if defined(SPECACHE_TILES)
  if (Tiles::serve(p.in)) {
    const Tiles tiles(rows, p.num_rows, p.in);
    share_out(p, Tiles::kOuts, [&](int64_t i, int64_t first, int64_t end) {
      tiles.multiply(static_cast<const uint16_t*>(p.weights[i]), p.out[i], first, end, static_cast<uint16_t*>(p.results[i]));
    });
    return;
  }
#endif
#if defined(__AVX512BF16__)
  multiply<Pairs>(p, rows);
#else
  multiply<Widened>(p, widened(p).get());
#endif
}

}  // namespace specache

extern "C" {

// Whether tiles multiply bfloat16 here.
bool specache_has_tiles() {
#if defined(SPECACHE_TILES)
  return specache::Tiles::serve(0);
#else
  return false;
#endif
}

void specache_products(const SpecacheProducts* p) {
  if (p->int8 && p->bfloat16)
    specache::multiply<specache::Int8<specache::kBFloat16>>(*p, specache::widened(*p).get());
  else if (p->int8)
    specache::multiply<specache::Int8<specache::kFloat32>>(*p, static_cast<const float*>(p->rows));
  else if (p->bfloat16)
    specache::multiply_bfloat16(*p);
  else
    specache::multiply<specache::Float32>(*p, static_cast<const float*>(p->rows));
}
}

// A few rows times weights, at the speed at which the weights can be read: decoding is bound by that, and BLAS packs
// the weight first or takes one row at a time. See graph_ops.py.
#include <atomic>
#include <cstdint>
#include <cstring>

namespace {

#if defined(SPECACHE_AVX512)
constexpr int kBytes = 64;
#elif defined(SPECACHE_AVX2)
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;
#endif
constexpr int kLanes = kBytes / 4;
constexpr int kMaxRows = 8, kMaxWeights = 8;
constexpr int64_t kTaskBytes = 1 << 17;  // of weights: microseconds of reading

typedef float Floats __attribute__((vector_size(kBytes)));
typedef uint32_t Words __attribute__((vector_size(kBytes)));
typedef uint16_t Halves __attribute__((vector_size(kBytes / 2)));

struct Bfloat16 {
  uint16_t bits;
};

inline Floats load(const float* from) {
  Floats v;
  memcpy(&v, from, kBytes);
  return v;
}

inline Floats load(const Bfloat16* from) {
  Halves v;
  memcpy(&v, from, kBytes / 2);
  return (Floats)(__builtin_convertvector(v, Words) << 16);
}

inline float to_float(float x) { return x; }
inline float to_float(Bfloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

inline void put(float* to, float x) { *to = x; }
inline void put(Bfloat16* to, float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  // To the nearest, ties to even; a NaN keeps its quiet bit and its sign.
  const bool nan = (bits & 0x7fffffff) > 0x7f800000;
  to->bits = static_cast<uint16_t>(nan ? (bits >> 16) | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float sum(Floats v) {
  float total = 0;
  for (int i = 0; i < kLanes; i++) total += v[i];
  return total;
}

// COUNT rows of the weight, one behind the other, times ROWS rows of `rows`. With few sums, there are several of each,
// so that no addition waits for the one before.
template <class T, int ROWS, int COUNT>
inline void times(const float* rows, const T* weight, int64_t in, T* out, int64_t out_stride) {
  constexpr int kSums = ROWS * COUNT == 1 ? 4 : ROWS * COUNT <= 4 ? 2 : 1;
  Floats sums[ROWS][COUNT][kSums] = {};
  int64_t c = 0;
  for (; c + kSums * kLanes <= in; c += kSums * kLanes)
    for (int i = 0; i < kSums; i++) {
      Floats w[COUNT];
      for (int n = 0; n < COUNT; n++) w[n] = load(weight + n * in + c + i * kLanes);
      for (int r = 0; r < ROWS; r++) {
        const Floats x = load(rows + r * in + c + i * kLanes);
        for (int n = 0; n < COUNT; n++) sums[r][n][i] += x * w[n];
      }
    }
  for (; c + kLanes <= in; c += kLanes)
    for (int r = 0; r < ROWS; r++)
      for (int n = 0; n < COUNT; n++) sums[r][n][0] += load(rows + r * in + c) * load(weight + n * in + c);
  for (int r = 0; r < ROWS; r++)
    for (int n = 0; n < COUNT; n++) {
      for (int i = 1; i < kSums; i++) sums[r][n][0] += sums[r][n][i];
      float total = sum(sums[r][n][0]);
      for (int64_t rest = c; rest < in; rest++) total += rows[r * in + rest] * to_float(weight[n * in + rest]);
      put(out + r * out_stride + n, total);
    }
}

// Rows of the weight at a time where reading `rows` takes as long as reading the weight: with more than two, or where
// they don't stay in the first-level cache. Sums, those rows' parts and the weight's are to fit in registers.
constexpr int count_of(int rows) {
  const int most = (kBytes == 64 ? 24 : 12) / rows, wanted = rows <= 2 && kBytes == 64 ? 8 : 4;
  return most < wanted ? most : wanted;
}
constexpr int64_t kNearBytes = 1 << 14;  // of `rows`: fewer stay there, and the weight is read best from end to end

}  // namespace

extern "C" {

struct SpecacheProducts {
  int64_t num_rows, in, bfloat16;  // 1 to 8 rows; weights and results of one dtype
  int64_t num_weights, threads;
  const float* rows;                 // [num_rows][in]
  const void* weights[kMaxWeights];  // [out[i]][in] each
  int64_t out[kMaxWeights];
  void* results[kMaxWeights];        // [num_rows][out[i]] each
};
}

namespace {

template <class T, int ROWS, int COUNT>
void multiply_by(const SpecacheProducts& p) {
  int64_t per_task = kTaskBytes / static_cast<int64_t>(p.in * sizeof(T));
  per_task = per_task < COUNT ? COUNT : per_task / COUNT * COUNT;
  int64_t num_tasks = 0;
  for (int64_t i = 0; i < p.num_weights; i++) num_tasks += (p.out[i] + per_task - 1) / per_task;
  const int64_t threads = num_tasks < 2 * p.threads ? 1 : p.threads;
  std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    for (int64_t task = next++; task < num_tasks; task = next++) {
      int64_t i = 0, left = task;
      while (left >= (p.out[i] + per_task - 1) / per_task) left -= (p.out[i++] + per_task - 1) / per_task;
      const int64_t first = left * per_task, end = first + per_task < p.out[i] ? first + per_task : p.out[i];
      const T* weight = static_cast<const T*>(p.weights[i]);
      T* result = static_cast<T*>(p.results[i]);
      int64_t o = first;
      for (; o + COUNT <= end; o += COUNT)
        times<T, ROWS, COUNT>(p.rows, weight + o * p.in, p.in, result + o, p.out[i]);
      for (; o < end; o++) times<T, ROWS, 1>(p.rows, weight + o * p.in, p.in, result + o, p.out[i]);
    }
  }
}

template <class T, int ROWS>
void multiply(const SpecacheProducts& p) {
  if (ROWS <= 2 && 4 * ROWS * p.in < kNearBytes) return multiply_by<T, ROWS, 1>(p);
  multiply_by<T, ROWS, count_of(ROWS)>(p);
}

template <class T>
void multiply_rows(const SpecacheProducts& p) {
  switch (p.num_rows) {
    case 1: return multiply<T, 1>(p);
    case 2: return multiply<T, 2>(p);
    case 3: return multiply<T, 3>(p);
    case 4: return multiply<T, 4>(p);
    case 5: return multiply<T, 5>(p);
    case 6: return multiply<T, 6>(p);
    case 7: return multiply<T, 7>(p);
    default: return multiply<T, kMaxRows>(p);
  }
}

}  // namespace

extern "C" {

void specache_products(const SpecacheProducts* p) {
  if (p->bfloat16)
    multiply_rows<Bfloat16>(*p);
  else
    multiply_rows<float>(*p);
}
}

// Attention on CPUs, for XLA's foreign function interface: forward, gradients, and a few queries against many keys.
// What is computed is told in jattn/kernels/native.py, how in kernel.inc.

#include <algorithm>
#include <atomic>
#include <climits>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>

#include "xla/ffi/api/ffi.h"

#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 12
#error "GCC 12 or newer, or Clang, is needed: name one in CXX"
#endif

namespace ffi = xla::ffi;

constexpr float LOG2E = 1.4426950408889634f;
constexpr float LEAST = -3.4028234663852886e38f;  // the largest score of a query that sees nothing
constexpr int KEYS = 64;                          // of a block: they and their values stay in the nearest cache
constexpr int QUERIES = 256;                       // of a task, which read a block of keys tile by tile
constexpr int MAX_DIM = 256;
constexpr int PART = 1024;  // keys of a task with few queries

struct Half {  // bfloat16
  uint16_t bits;
};
static inline float as_float(Half x) {
  uint32_t bits = (uint32_t)x.bits << 16;
  float y;
  memcpy(&y, &bits, 4);
  return y;
}

// Sizes as in the axis legend, and everything that scores depend on. A query sees the slots low <= s < high whose id is
// its own. Pointers may be null: no ids, no ALiBi (slopes, and positions of the queries). cap 0: no soft cap.
struct Scores {
  int B, T, S, N, K, H, D;
  float scale, cap;
  const int *low, *high, *query_ids, *key_ids, *positions;
  const float* slopes;

  // Rows of [B,T,N,...] and of [B,S,K,...].
  long row_of_query(int b, int t, int h) const { return ((long)b * T + t) * N + h; }
  long row_of_key(int b, int j, int kv) const { return ((long)b * S + j) * K + kv; }
  // What queries are multiplied by: products are then scores, or those divided by the cap.
  float factor() const { return cap ? scale / cap : scale; }
};
// The largest score of a query and the sum of exp(score - largest), kept apart: at large scores their logarithms' sum
// would lose the smaller. NaN where the query sees one, and LEAST and 0 where it sees nothing.
template <typename In>
struct Forward {
  const In *q, *k, *v;
  float *out, *row_max, *row_sum;
};
template <typename In>
struct Backward {
  const In *q, *k, *v;
  const float *row_max, *d_out, *d_sum;
  float *d_q, *d_k, *d_v;
};
template <typename In>
struct Decode {
  const In *q, *k, *v;
};

#define W 4
namespace any_cpu {
#include "kernel.inc"
}
#undef W
#ifdef __x86_64__
#define X86
// Functions up to END may use an instruction set.
#ifdef __clang__
#define BEGIN(set) PRAGMA(clang attribute push(__attribute__((target(set))), apply_to = function))
#define END PRAGMA(clang attribute pop)
#else
#define BEGIN(set) PRAGMA(GCC push_options) PRAGMA(GCC target(set))
#define END PRAGMA(GCC pop_options)
#endif
#define PRAGMA(...) _Pragma(#__VA_ARGS__)
BEGIN("avx2,fma")
#define W 8
namespace avx2 {
#include "kernel.inc"
}
#undef W
END
BEGIN("avx512f,avx512bw,avx512dq,avx512vl,fma")
#define W 16
namespace avx512 {
#include "kernel.inc"
}
#undef W
END
#endif

// The widest vectors of this CPU, in floats.
extern "C" int widest() {
#ifdef X86
  bool has512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (has512) return 16;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 8;
#endif
  return 4;
}

// The vectors asked for, 0: the widest.
static int resolved(int width) { return width ? width : widest(); }

#ifdef X86
#define BY_WIDTH(width, call) ((width) == 16 ? avx512::call : (width) == 8 ? avx2::call : any_cpu::call)
#else
#define BY_WIDTH(width, call) any_cpu::call
#endif

// work(i, memory) for i < count, by the caller and by threads of the pool that are free. The caller waits for those at
// work alone: it may be one of the pool itself, and tasks that nobody has taken up find nothing left to do.
template <typename Work>
static void parallel(ffi::ThreadPool& pool, long count, long floats, const Work& work) {
  struct State {
    std::atomic<long> next{0};
    std::mutex mutex;
    std::condition_variable done;
    int working = 0;
    bool closed = false;
  };
  auto state = std::make_shared<State>();
  auto run = [state, count, floats, &work] {
    std::unique_ptr<float, decltype(&free)> memory(
        (float*)aligned_alloc(64, (floats * sizeof(float) + 63) / 64 * 64), &free);
    for (long i; (i = state->next++) < count;) work(i, memory.get());
  };
  const long helpers = std::min<long>(pool.num_threads(), count) - 1;
  for (long i = 0; i < helpers; i++)
    pool.Schedule([state, run] {
      {
        std::lock_guard<std::mutex> lock(state->mutex);
        if (state->closed) return;
        state->working++;
      }
      run();
      std::lock_guard<std::mutex> lock(state->mutex);
      if (--state->working == 0) state->done.notify_one();
    });
  run();
  std::unique_lock<std::mutex> lock(state->mutex);
  state->closed = true;
  state->done.wait(lock, [&] { return state->working == 0; });
}

using Floats = ffi::Buffer<ffi::F32>;
using Ints = ffi::Buffer<ffi::S32>;
using Result = ffi::ResultBuffer<ffi::F32>;

static const int* or_null(Ints& x) { return x.element_count() ? x.typed_data() : nullptr; }

// numbers: scale and cap. Empty arrays stand for those that there are not.
static Scores scores_of(ffi::AnyBuffer& q, ffi::AnyBuffer& k, ffi::AnyBuffer& v, Floats& numbers, Ints& low, Ints& high,
                        Ints& query_ids, Ints& key_ids, Ints& positions, Floats& slopes) {
  auto query = q.dimensions(), key = k.dimensions();
  Scores s{(int)query[0], (int)query[1], (int)key[1], (int)query[2], (int)key[2], (int)query[3],
           (int)v.dimensions()[3]};
  s.scale = numbers.typed_data()[0], s.cap = numbers.typed_data()[1];
  s.low = low.typed_data(), s.high = high.typed_data();
  s.query_ids = or_null(query_ids), s.key_ids = or_null(key_ids), s.positions = or_null(positions);
  s.slopes = slopes.element_count() ? slopes.typed_data() : nullptr;
  return s;
}

template <typename In>
static const In* data(ffi::AnyBuffer& x) {
  return reinterpret_cast<const In*>(x.untyped_data());
}

template <typename In>
static void forward_all(ffi::ThreadPool& pool, int width, const Scores& s, const Forward<In>& f) {
  const int tasks = (s.T + QUERIES - 1) / QUERIES;
  parallel(pool, (long)s.B * s.N * tasks, BY_WIDTH(width, forward_floats(s)), [&](long i, float* memory) {
    long head = i / tasks;
    int t0 = (tasks - 1 - i % tasks) * QUERIES;  // under a causal mask the last take longest
    BY_WIDTH(width, forward(s, f, head / s.N, head % s.N, t0, memory));
  });
}

static ffi::Error forward(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, Floats numbers,
                          Ints low, Ints high, Ints query_ids, Ints key_ids, Ints positions, Floats slopes, Result out,
                          Result row_max, Result row_sum, int32_t width) {
  Scores s = scores_of(q, k, v, numbers, low, high, query_ids, key_ids, positions, slopes);
  float *to = out->typed_data(), *to_max = row_max->typed_data(), *to_sum = row_sum->typed_data();
  if (q.element_type() == ffi::BF16)
    forward_all<Half>(pool, resolved(width), s, {data<Half>(q), data<Half>(k), data<Half>(v), to, to_max, to_sum});
  else
    forward_all<float>(pool, resolved(width), s, {data<float>(q), data<float>(k), data<float>(v), to, to_max, to_sum});
  return ffi::Error::Success();
}

template <typename In>
static void backward_all(ffi::ThreadPool& pool, int width, const Scores& s, const Backward<In>& g, int parts) {
  parallel(pool, (long)s.B * s.K * parts, BY_WIDTH(width, backward_floats(s)), [&](long i, float* memory) {
    long head = i / parts;
    BY_WIDTH(width, backward(s, g, head / s.K, head % s.K, i % parts, parts, memory));
  });
}

static ffi::Error backward(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, Floats numbers,
                           Ints low, Ints high, Ints query_ids, Ints key_ids, Ints positions, Floats slopes, Floats row_max,
                           Floats d_out, Floats d_sum, Result d_q, Result d_k, Result d_v, int32_t width) {
  Scores s = scores_of(q, k, v, numbers, low, high, query_ids, key_ids, positions, slopes);
  const int parts = d_k->dimensions()[0];
  const float *of_max = row_max.typed_data(), *of_out = d_out.typed_data(), *of_sum = d_sum.typed_data();
  float *to_q = d_q->typed_data(), *to_k = d_k->typed_data(), *to_v = d_v->typed_data();
  if (q.element_type() == ffi::BF16)
    backward_all<Half>(pool, resolved(width), s,
                       {data<Half>(q), data<Half>(k), data<Half>(v), of_max, of_out, of_sum, to_q, to_k, to_v}, parts);
  else
    backward_all<float>(
        pool, resolved(width), s, {data<float>(q), data<float>(k), data<float>(v), of_max, of_out, of_sum, to_q, to_k, to_v},
        parts);
  return ffi::Error::Success();
}

template <typename In>
static void decode_all(ffi::ThreadPool& pool, int width, const Scores& s, const Decode<In>& f, float* out, float* row_max,
                       float* row_sum, float* scratch, int parts) {
  const long rows = (long)s.N * s.T, all = s.B * parts * rows;
  float *sums = scratch, *largest = sums + all * s.D, *totals = largest + all;
  parallel(pool, (long)s.B * parts, BY_WIDTH(width, decode_floats(s)), [&](long i, float* memory) {
    int b = i / parts, part = i % parts;
    BY_WIDTH(width, decode(s, f, b, part * PART, std::min(s.S, (part + 1) * PART), sums + i * rows * s.D,
                           largest + i * rows, totals + i * rows, memory));
  });
  for (int b = 0; b < s.B; b++) {
    long at = (long)b * parts * rows;
    BY_WIDTH(width, merge(s, sums + at * s.D, largest + at, totals + at, parts, out, row_max, row_sum, b));
  }
}

static ffi::Error decode(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, Floats numbers,
                         Ints low, Ints high, Ints query_ids, Ints key_ids, Ints positions, Floats slopes, Result out,
                         Result row_max, Result row_sum, Result scratch, int32_t width) {
  Scores s = scores_of(q, k, v, numbers, low, high, query_ids, key_ids, positions, slopes);
  const int parts = scratch->dimensions()[1];
  float *to = out->typed_data(), *to_max = row_max->typed_data(), *to_sum = row_sum->typed_data();
  float* other = scratch->typed_data();
  if (q.element_type() == ffi::BF16)
    decode_all<Half>(pool, resolved(width), s, {data<Half>(q), data<Half>(k), data<Half>(v)}, to, to_max, to_sum, other, parts);
  else
    decode_all<float>(pool, resolved(width), s, {data<float>(q), data<float>(k), data<float>(v)}, to, to_max, to_sum, other, parts);
  return ffi::Error::Success();
}

#define SCORES                                                                                                     \
  ffi::Ffi::Bind()                                                                                                 \
      .Ctx<ffi::ThreadPool>()                                                                                      \
      .Arg<ffi::AnyBuffer>()                                                                                       \
      .Arg<ffi::AnyBuffer>()                                                                                       \
      .Arg<ffi::AnyBuffer>()                                                                                       \
      .Arg<Floats>()                                                                                               \
      .Arg<Ints>()                                                                                                 \
      .Arg<Ints>()                                                                                                 \
      .Arg<Ints>()                                                                                                 \
      .Arg<Ints>()                                                                                                 \
      .Arg<Ints>()                                                                                                 \
      .Arg<Floats>()

XLA_FFI_DEFINE_HANDLER_SYMBOL(jattn_forward, forward,
                              SCORES.Ret<Floats>().Ret<Floats>().Ret<Floats>().Attr<int32_t>("width"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jattn_backward, backward,
    SCORES.Arg<Floats>().Arg<Floats>().Arg<Floats>().Ret<Floats>().Ret<Floats>().Ret<Floats>().Attr<int32_t>("width"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(jattn_decode, decode,
                              SCORES.Ret<Floats>().Ret<Floats>().Ret<Floats>().Ret<Floats>().Attr<int32_t>("width"));

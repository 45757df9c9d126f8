// Attention on CPUs, for XLA's foreign function interface: forward, gradients, and a few queries against many keys.
// jattn/kernels/native.py describes what is computed, and kernel.inc how.

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
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <arm_neon.h>
#include <sys/auxv.h>
#define ARM_BFLOAT16
#endif

#include "xla/ffi/api/ffi.h"

#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 12
#error "GCC 12 or newer, or Clang, is needed: name one in CXX"
#endif

namespace ffi = xla::ffi;

constexpr float LOG2E = 1.4426950408889634f;
constexpr float LEAST = -3.4028234663852886e38f;  // the largest score of a query that sees nothing
constexpr int KEYS = 64;                          // per block: they and their values stay in the nearest cache
constexpr int QUERIES = 256;                       // per task, which read a block of keys tile by tile
constexpr int ROWS = 128;      // per step of the backward pass: their data takes half of 512 KiB
constexpr int READS = 2;       // of a key, at most, by steps or tasks: with more, a copy that is read faster pays off
constexpr int MAX_DIM = 256;
constexpr int PART = 1024;  // keys per task with few queries

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
static inline float of_bits(uint32_t bits) {
  float y;
  memcpy(&y, &bits, 4);
  return y;
}
static inline float as_float(float x) { return x; }
static inline float as_float(BFloat16 x) { return of_bits((uint32_t)x.bits << 16); }
static inline float as_float(Float16 x) {
  const uint32_t sign = (x.bits & 0x8000u) << 16, rest = x.bits & 0x7fffu;
  const float small = (float)(int)rest * 5.9604644775390625e-8f;  // below 2^-14, a multiple of 2^-24
  const uint32_t large = rest < 0x7c00u ? (rest << 13) + (112u << 23) : rest << 13 | 0x7f800000u;  // or infinite, or NaN
  uint32_t bits;
  memcpy(&bits, &small, 4);
  return of_bits(sign | (rest < 0x400u ? bits : large));
}

// An array [B|1,N|1,T|1,S|1], read in place: an axis of size 1 has a step of 0. May be null.
struct Pairs {
  const void* data;
  bool is_bfloat16;
  long of_b, of_h, of_t, of_s;

  long at(int b, int h, int t, int j) const { return b * of_b + h * of_h + t * of_t + j * of_s; }
};

// Sizes as in the axis legend, and all inputs of scores. A query sees the keys low <= position <= high that have the
// query's id and are shown by the mask. Pointers may be null; a null key_positions means that positions equal slots.
struct Scores {
  int B, T, S, N, K, H, D;
  float scale, cap, kept;                     // cap 0: no soft cap; kept: 1 / (1 - rate) of dropout
  unsigned dropped;                           // pairs with a smaller hash are dropped
  const int *low, *high, *lengths;            // [B|1,N|1,T], and [B]: the slots of the keys
  long of_b, of_h;                            // the steps of low and high
  const int *query_ids, *key_ids;             // [B,T], [B,S]
  const int *positions, *key_positions;       // [B,T], [B,S]
  const float *slopes, *relative;             // [N], and [N,2*distance+1]: by the query's position minus the key's
  int distance;                               // distances beyond use the last entry
  Pairs bias, mask;
  const unsigned* seeds;                      // [B|1,N|1,2], of dropout
  long seeds_of_b, seeds_of_h;

  bool by_head = false;

  // Rows of [B,T,N,...], and of [B,S,K,...] or, by head, [B,K,S,...].
  long row_of_query(int b, int t, int h) const { return ((long)b * T + t) * N + h; }
  long row_of_key(int b, int j, int kv) const {
    return by_head ? ((long)b * K + kv) * S + j : ((long)b * S + j) * K + kv;
  }
  long step_of_keys() const { return by_head ? 1 : K; }
  long ends(int b, int h, int t) const { return b * of_b + h * of_h + t; }
  int slots(int b) const { return lengths ? std::max(std::min(lengths[b], S), 0) : S; }
  int position_of_key(int b, int j) const { return key_positions ? key_positions[(long)b * S + j] : j; }
  const unsigned* seed(int b, int h) const { return seeds + b * seeds_of_b + h * seeds_of_h; }
  // The factor on queries, or on their products with pairs, that yields scores, or scores divided by the cap.
  float factor() const { return cap ? scale / cap : scale; }
};
// The largest score of a query and the sum of exp(score - largest), kept separate: at large scores, adding the latter's
// logarithm would lose its digits. NaN if the query sees a NaN, and LEAST and 0 if it sees nothing.
template <typename In>
struct Forward {
  const In *q, *k, *v;
  float *out, *row_max, *row_sum;
};
template <typename In>
struct Backward {
  const In *q, *k, *v;
  const float *row_max, *inverse, *d_out, *delta;  // of d_score = weight (d_out . value + delta), weight with inverse
  float *d_q, *d_k, *d_v, *totals;  // totals: each query's sum of d_score as used in d_q; not for floats
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
// Functions up to END may use an instruction set.
#ifdef __clang__
#define BEGIN(set) PRAGMA(clang attribute push(__attribute__((target(set))), apply_to = function))
#define END PRAGMA(clang attribute pop)
#else
#define BEGIN(set) PRAGMA(GCC push_options) PRAGMA(GCC target(set))
#define END PRAGMA(GCC pop_options)
#endif
#define PRAGMA(...) _Pragma(#__VA_ARGS__)
#ifdef __x86_64__
#define X86
BEGIN("avx2,fma,f16c")
#define W 8
namespace avx2 {
#include "kernel.inc"
}
#undef W
END
BEGIN("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")
#define W 16
namespace avx512 {
#include "kernel.inc"
}
#undef W
END
BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,f16c")
#define W 16
#define BFLOAT16_PRODUCTS
namespace avx512_bf16 {
#include "kernel.inc"
}
#undef BFLOAT16_PRODUCTS
#undef W
END
#endif

#ifdef ARM_BFLOAT16
#ifdef __clang__
BEGIN("bf16")
#else
BEGIN("arch=armv8.2-a+bf16")
#endif
#define W 4
#define BFLOAT16_PRODUCTS
namespace arm_bfloat16 {
#include "kernel.inc"
}
#undef BFLOAT16_PRODUCTS
#undef W
END
#endif

// The widest vectors of this CPU, in floats.
extern "C" int widest() {
#ifdef X86
  bool has512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (has512) return 16;  // these have fma and f16c as well
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) return 8;
#endif
  return 4;
}

// Whether this CPU has bfloat16 products.
extern "C" int has_bfloat16_products() {
#ifdef X86
  return widest() == 16 && __builtin_cpu_supports("avx512bf16");
#elif defined(ARM_BFLOAT16)
  return (getauxval(AT_HWCAP2) & 1 << 14) != 0;
#endif
  return 0;
}

// The requested vectors (0: the widest); BFLOAT16 for vectors with bfloat16 products.
constexpr int BFLOAT16 = 17;
template <typename In>
static int resolved(int width, bool in_float32) {
  width = width ? width : widest();
  return std::is_same_v<In, BFloat16> && width == widest() && !in_float32 && has_bfloat16_products() ? BFLOAT16 : width;
}

#ifdef X86
#define BY_WIDTH(width, call) \
  ((width) == BFLOAT16 ? avx512_bf16::call : (width) == 16 ? avx512::call : (width) == 8 ? avx2::call : any_cpu::call)
#elif defined(ARM_BFLOAT16)
#define BY_WIDTH(width, call) ((width) == BFLOAT16 ? arm_bfloat16::call : any_cpu::call)
#else
#define BY_WIDTH(width, call) any_cpu::call
#endif

// work(i, memory) for i < count, run by the caller and by free threads of the pool. The caller waits only for threads
// at work, because it may belong to the pool itself; tasks started later find nothing left to do.
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
using Result = ffi::ResultBuffer<ffi::F32>;

static Pairs pairs_of(const ffi::AnyBuffer& x) {
  auto n = x.dimensions();
  if (!x.element_count()) return {};
  return {x.untyped_data(), x.element_type() == ffi::BF16, n[0] > 1 ? n[1] * n[2] * n[3] : 0, n[1] > 1 ? n[2] * n[3] : 0,
          n[2] > 1 ? n[3] : 0, n[3] > 1};
}

// The operands after `rest` are listed in jattn/kernels/native.py. Empty arrays stand for absent operands.
static Scores scores_of(ffi::AnyBuffer& q, ffi::AnyBuffer& k, ffi::AnyBuffer& v, ffi::RemainingArgs& rest,
                        int32_t dropped) {
  auto query = q.dimensions(), key = k.dimensions().last(3);
  Scores s{(int)query[0], (int)query[1], (int)key[0], (int)query[2], (int)key[1], (int)query[3],
           (int)v.dimensions().back()};
  int i = 0;
  auto next = [&] { return *rest.get<ffi::AnyBuffer>(i++); };
  auto ints = [](const ffi::AnyBuffer& x) { return x.element_count() ? (const int*)x.untyped_data() : nullptr; };
  auto floats = [&](const ffi::AnyBuffer& x) { return (const float*)ints(x); };
  const float* numbers = floats(next());
  s.scale = numbers[0], s.cap = numbers[1], s.kept = numbers[2], s.dropped = (unsigned)dropped;
  auto low = next(), high = next();
  auto ends = low.dimensions();
  s.low = ints(low), s.high = ints(high);
  s.of_b = ends[0] > 1 ? ends[1] * ends[2] : 0, s.of_h = ends[1] > 1 ? ends[2] : 0;
  s.lengths = ints(next()), s.query_ids = ints(next()), s.key_ids = ints(next());
  s.positions = ints(next()), s.key_positions = ints(next());
  s.slopes = floats(next());
  auto relative = next();
  s.relative = floats(relative), s.distance = (int)(relative.dimensions()[1] / 2);
  s.bias = pairs_of(next()), s.mask = pairs_of(next());
  auto seeds = next();
  s.seeds = (const unsigned*)ints(seeds);
  s.seeds_of_b = seeds.dimensions()[0] > 1 ? seeds.dimensions()[1] * 2 : 0, s.seeds_of_h = seeds.dimensions()[1] > 1 ? 2 : 0;
  return s;
}

template <typename In>
static const In* data(ffi::AnyBuffer& x) {
  return reinterpret_cast<const In*>(x.untyped_data());
}

// `call` with a number of the array's type.
template <typename Call>
static void in_type_of(const ffi::AnyBuffer& x, const Call& call) {
  if (x.element_type() == ffi::BF16) return call(BFloat16{});
  if (x.element_type() == ffi::F16) return call(Float16{});
  call(0.0f);
}

struct Free {
  void operator()(void* x) const { free(x); }
};
template <typename X>
using Array = std::unique_ptr<X[], Free>;
template <typename X>
static Array<X> array_of(long count) {
  return Array<X>((X*)aligned_alloc(64, (count * sizeof(X) + 63) / 64 * 64));
}

// The key or value rows seen by queries, as [B,K,S,width]. A head's rows in [B,S,K,width] span so many pages that the
// processor would have to look up their addresses again and again.
template <typename In>
static Array<In> by_head(ffi::ThreadPool& pool, const Scores& s, const In* x, int width) {
  Array<In> to = array_of<In>((long)s.B * s.K * s.S * width);
  parallel(pool, (long)s.B * s.K, 0, [&](long i, float*) {
    const long b = i / s.K, kv = i % s.K;
    int low = s.key_positions ? 0 : s.S, high = s.key_positions ? s.S - 1 : -1;
    for (int h = kv * (s.N / s.K), end = s.of_h ? h + s.N / s.K : h + 1; h < end && !s.key_positions; h++)
      for (int t = 0; t < s.T; t++) {
        const long at = s.ends(b, h, t);
        if (s.low[at] <= s.high[at]) low = std::min(low, s.low[at]), high = std::max(high, s.high[at]);
      }
    low = std::max(low, 0), high = std::min(high, s.slots(b) - 1);
    for (long j = low; j <= high; j++)
      memcpy(to.get() + (i * s.S + j) * width, x + ((b * s.S + j) * s.K + kv) * width, sizeof(In) * width);
  });
  return to;
}

template <typename In>
static void forward_all(ffi::ThreadPool& pool, int width, Scores s, Forward<In> f) {
  const int tasks = (s.T + QUERIES - 1) / QUERIES;
  Array<In> k, v;
  if (s.K > 1 && tasks * (s.N / s.K) > READS) {
    k = by_head(pool, s, f.k, s.H), v = by_head(pool, s, f.v, s.D);
    f.k = k.get(), f.v = v.get(), s.by_head = true;
  }
  parallel(pool, (long)s.B * s.N * tasks, BY_WIDTH(width, forward_floats(s)), [&](long i, float* memory) {
    long head = i / tasks;
    int t0 = (tasks - 1 - i % tasks) * QUERIES;  // under a causal mask, the last tasks take longest
    BY_WIDTH(width, forward(s, f, head / s.N, head % s.N, t0, memory));
  });
}

static ffi::Error forward(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                          ffi::RemainingArgs rest, Result out, Result row_max, Result row_sum, int32_t width,
                          int32_t dropped, bool in_float32) {
  Scores s = scores_of(q, k, v, rest, dropped);
  float *to = out->typed_data(), *to_max = row_max->typed_data(), *to_sum = row_sum->typed_data();
  in_type_of(q, [&](auto x) {
    using In = decltype(x);
    forward_all<In>(pool, resolved<In>(width, in_float32), s, {data<In>(q), data<In>(k), data<In>(v), to, to_max, to_sum});
  });
  return ffi::Error::Success();
}

// The sum over parts of [parts,B,K,S,width] as [B,S,K,width].
static void sum_by_row(ffi::ThreadPool& pool, const Scores& s, const float* parts, int count, float* to, int width) {
  const long all = (long)s.B * s.K * s.S * width;
  parallel(pool, (long)s.B * s.K, 0, [&](long i, float*) {
    const long b = i / s.K, kv = i % s.K;
    for (long j = 0; j < s.S; j++) {
      float* row = to + ((b * s.S + j) * s.K + kv) * width;
      const float* from = parts + (i * s.S + j) * width;
      memcpy(row, from, sizeof(float) * width);
      for (int p = 1; p < count; p++)
        for (int c = 0; c < width; c++) row[c] += from[p * all + c];
    }
  });
}

template <typename In>
static void backward_all(ffi::ThreadPool& pool, int width, Scores s, Backward<In> g) {
  const long heads = (long)s.B * s.K, blocks = (s.T + ROWS - 1) / ROWS * (s.N / s.K);
  const int parts = std::max<long>(1, std::min<long>(blocks, (2 * pool.num_threads() + heads - 1) / heads));
  float *to_k = g.d_k, *to_v = g.d_v;
  Array<In> k, v;
  Array<float> d_k, d_v;
  if (parts > 1 || (s.K > 1 && blocks > READS)) {
    k = by_head(pool, s, g.k, s.H), v = by_head(pool, s, g.v, s.D);
    d_k = array_of<float>(parts * heads * s.S * s.H), d_v = array_of<float>(parts * heads * s.S * s.D);
    g.k = k.get(), g.v = v.get(), g.d_k = d_k.get(), g.d_v = d_v.get(), s.by_head = true;
  }
  parallel(pool, heads * parts, BY_WIDTH(width, backward_floats(s)), [&](long i, float* memory) {
    long head = i / parts;
    BY_WIDTH(width, backward(s, g, head / s.K, head % s.K, i % parts, parts, memory));
  });
  if (s.by_head) sum_by_row(pool, s, d_k.get(), parts, to_k, s.H), sum_by_row(pool, s, d_v.get(), parts, to_v, s.D);
}

static ffi::Error backward(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, Floats row_max,
                           Floats inverse, Floats d_out, Floats delta, ffi::RemainingArgs rest, Result d_q, Result d_k, Result d_v,
                           Result totals, int32_t width, int32_t dropped, bool in_float32) {
  Scores s = scores_of(q, k, v, rest, dropped);
  const float *of_max = row_max.typed_data(), *of_sum = inverse.typed_data();
  const float *of_out = d_out.typed_data(), *of_row = delta.typed_data();
  float *to_q = d_q->typed_data(), *to_k = d_k->typed_data(), *to_v = d_v->typed_data();
  in_type_of(q, [&](auto x) {
    using In = decltype(x);
    backward_all<In>(pool, resolved<In>(width, in_float32), s,
                     {data<In>(q), data<In>(k), data<In>(v), of_max, of_sum, of_out, of_row, to_q, to_k, to_v,
                      totals->typed_data()});
  });
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

// Keys and values may hold all layers, [L,B,S,K,H], of which the queries see one.
static ffi::Error decode(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                         ffi::Buffer<ffi::S32> layer, ffi::RemainingArgs rest, Result out, Result row_max,
                         Result row_sum, Result scratch, int32_t width, int32_t dropped, bool) {
  Scores s = scores_of(q, k, v, rest, dropped);
  const int parts = scratch->dimensions()[1];
  const long last = k.dimensions().size() > 4 ? k.dimensions()[0] - 1 : 0;
  const long first = std::max(std::min<long>(layer.typed_data()[0], last), 0L) * s.B * s.S * s.K;
  float *to = out->typed_data(), *to_max = row_max->typed_data(), *to_sum = row_sum->typed_data();
  float* other = scratch->typed_data();
  in_type_of(q, [&](auto x) {
    using In = decltype(x);
    const In *key = data<In>(k) + first * s.H, *value = data<In>(v) + first * s.D;
    decode_all<In>(pool, resolved<In>(width, true), s, {data<In>(q), key, value}, to, to_max, to_sum, other, parts);
  });
  return ffi::Error::Success();
}

#define QKV ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>()
#define SETTINGS Attr<int32_t>("width").Attr<int32_t>("dropped").Attr<bool>("in_float32")

XLA_FFI_DEFINE_HANDLER_SYMBOL(jattn_forward, forward,
                              QKV.RemainingArgs().Ret<Floats>().Ret<Floats>().Ret<Floats>().SETTINGS);
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jattn_backward, backward,
    QKV.Arg<Floats>().Arg<Floats>().Arg<Floats>().Arg<Floats>().RemainingArgs().Ret<Floats>().Ret<Floats>().Ret<Floats>().Ret<Floats>().SETTINGS);
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jattn_decode, decode,
    QKV.Arg<ffi::Buffer<ffi::S32>>().RemainingArgs().Ret<Floats>().Ret<Floats>().Ret<Floats>().Ret<Floats>().SETTINGS);

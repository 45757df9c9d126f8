// Runs the compiled kernels without JAX: the forward pass, the gradients and few queries, at each width of vectors that
// the CPU has, against the formula in double precision. Calls go through XLA's C interface, with threads of this file.
//
//     driver LIBRARY
//
// It prints what is wrong and exits 1.

#include <dlfcn.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>
#include <thread>
#include <vector>

#include "xla.h"

// What a query sees: an interval of keys, and of those the ones with its id.
enum class Mask { full, causal, window, ragged, segments };
struct Case {
  const char* name;
  int B, T, S, N, K, H, D;
  Mask mask = Mask::full;
  float cap = 0;
  bool alibi = false, halves = false;
  int parts = 1;
};
static const Case CASES[] = {
    {"one tile", 1, 5, 7, 1, 1, 16, 16},
    {"full", 2, 300, 133, 2, 2, 32, 48},
    {"causal, shared keys", 1, 520, 520, 4, 2, 48, 32, Mask::causal, 0, false, false, 3},
    {"window, soft cap", 1, 290, 290, 2, 1, 64, 64, Mask::window, 3},
    {"ragged, alibi", 2, 140, 200, 2, 2, 32, 32, Mask::ragged, 0, true},
    {"segments, everything", 2, 130, 130, 4, 2, 16, 32, Mask::segments, 5, true},
    {"largest head", 1, 70, 65, 1, 1, 256, 256, Mask::causal},
    {"bfloat16", 1, 260, 260, 2, 1, 64, 64, Mask::causal, 0, false, true, 2},
    {"few, parts of the keys", 2, 3, 2100, 4, 2, 64, 64},
    {"few, ragged", 2, 2, 1500, 2, 1, 32, 48, Mask::ragged, 2, true},
    {"few, segments", 1, 9, 300, 4, 4, 16, 16, Mask::segments},
    {"few, bfloat16", 2, 1, 1100, 6, 2, 64, 64, Mask::window, 0, false, true},
    {"no keys", 1, 20, 0, 1, 1, 16, 16},
};

struct Inputs {
  Array q, k, v, numbers = Array::zeros({2}), low, high, query_ids, key_ids, positions, slopes, d_out, d_sum;
  std::vector<Array*> operands() {
    return {&q, &k, &v, &numbers, &low, &high, &query_ids, &key_ids, &positions, &slopes};
  }
  bool sees(const Case& c, int b, int t, int j) const {
    const long at = (long)b * c.T + t;
    return low.ints[at] <= j && j < high.ints[at] &&
           (c.mask != Mask::segments || query_ids.ints[at] == key_ids.ints[b * c.S + j]);
  }
};

static Inputs inputs_of(const Case& c) {
  std::mt19937 random(7);
  auto between = [&](int low, int high) { return low + (int)(random() % (high - low)); };
  auto normal = [&](std::vector<int64_t> dims) {
    Array x = Array::zeros(dims);
    for (float& one : x.floats) one = between(-1000, 1001) / 600.0f;
    return x;
  };
  Inputs in;
  in.q = normal({c.B, c.T, c.N, c.H}), in.k = normal({c.B, c.S, c.K, c.H}), in.v = normal({c.B, c.S, c.K, c.D});
  in.d_out = normal({c.B, c.T, c.N, c.D}), in.d_sum = normal({c.B, c.T, c.N});
  in.numbers.floats = {0.3f, c.cap};
  in.low = in.high = Array::of_ints({c.B, c.T});
  const bool segments = c.mask == Mask::segments;
  in.query_ids = Array::of_ints({segments ? c.B : 0, c.T}), in.key_ids = Array::of_ints({segments ? c.B : 0, c.S});
  in.positions = Array::of_ints({c.alibi ? c.B : 0, c.T}), in.slopes = Array::zeros({c.alibi ? c.N : 0});
  for (int i = 0; i < c.B * c.T; i++) {
    const int t = i % c.T + std::max(c.S - c.T, 0);
    int &low = in.low.ints[i], &high = in.high.ints[i];
    high = c.S;
    if (c.mask == Mask::causal) high = std::min(t + 1, c.S);
    if (c.mask == Mask::window) low = t - 70, high = t + 3;
    // Past both ends, empty, and nothing at all.
    if (c.mask == Mask::ragged) low = between(-40, c.S), high = between(0, c.S + 9);
    if (c.mask == Mask::ragged && i % 7 == 3) low = INT_MAX, high = INT_MIN;
    if (segments) in.query_ids.ints[i] = i % 50 > 40 ? -5 : i / 20 * 3;
    if (c.alibi) in.positions.ints[i] = i % 5 == 4 ? 2 * t : t;
  }
  for (size_t i = 0; i < in.key_ids.ints.size(); i++) in.key_ids.ints[i] = i % 50 > 40 ? -9 : i / 20 * 3;
  for (int n = 0; n < (int)in.slopes.floats.size(); n++) in.slopes.floats[n] = 0.02f * (n + 1);
  for (int b = 0; b < c.B; b++)  // keys that nobody sees
    for (int j = 0; j < c.S; j++) {
      bool seen = false;
      for (int t = 0; t < c.T; t++) seen |= in.sees(c, b, t, j);
      for (Array* x : {&in.k, &in.v}) {
        const long size = x->dims[2] * x->dims[3];
        if (!seen) std::fill_n(x->floats.begin() + (b * c.S + j) * size, size, NAN);
      }
    }
  if (c.halves)
    for (Array* x : {&in.q, &in.k, &in.v}) x->shorten();
  return in;
}

struct Results {
  Array out, row_max, row_sum, d_q, d_k, d_v;
};

static Results results_of(const Case& c, int parts = 1) {
  return {Array::zeros({c.B, c.T, c.N, c.D}), Array::zeros({c.B, c.T, c.N}), Array::zeros({c.B, c.T, c.N}),
          Array::zeros({c.B, c.T, c.N, c.H}), Array::zeros({parts, c.B, c.S, c.K, c.H}),
          Array::zeros({parts, c.B, c.S, c.K, c.D})};
}

static double product(const std::vector<float>& x, long i, const std::vector<float>& y, long j, int count) {
  double sum = 0;
  for (int d = 0; d < count; d++) sum += (double)x[i * count + d] * y[j * count + d];
  return sum;
}

static std::vector<double> as_doubles(const Array& x) { return {x.floats.begin(), x.floats.end()}; }
static void narrow(Array& x, const std::vector<double>& sums) { x.floats.assign(sums.begin(), sums.end()); }

// In double precision, one query of one head after another.
static Results formula(const Case& c, const Inputs& in) {
  Results r = results_of(c);
  auto d_q = as_doubles(r.d_q), d_k = as_doubles(r.d_k), d_v = as_doubles(r.d_v), out = as_doubles(r.out);
  const double scale = in.numbers.floats[0];
  for (long row = 0; row < (long)c.B * c.T * c.N; row++) {
    const int h = row % c.N, t = row / c.N % c.T, b = row / c.N / c.T;
    std::vector<double> score(c.S), slope(c.S, 1);
    double max = -3.4028234663852886e38, sum = 0;
    auto key = [&](int j) { return ((long)b * c.S + j) * c.K + h / (c.N / c.K); };
    for (int j = 0; j < c.S; j++) {
      if (!in.sees(c, b, t, j)) continue;
      score[j] = scale * product(in.q.floats, row, in.k.floats, key(j), c.H);
      if (c.cap) {
        const double bent = std::tanh(score[j] / c.cap);
        score[j] = c.cap * bent, slope[j] = 1 - bent * bent;
      }
      if (c.alibi) score[j] -= in.slopes.floats[h] * std::abs(in.positions.ints[b * c.T + t] - j);
      max = std::max(max, score[j]);
    }
    r.row_max.floats[row] = max;
    for (int j = 0; j < c.S; j++) {
      if (!in.sees(c, b, t, j)) continue;
      const double p = std::exp(score[j] - r.row_max.floats[row]);
      const double d = p * (product(in.d_out.floats, row, in.v.floats, key(j), c.D) + in.d_sum.floats[row]) * slope[j];
      sum += p;
      for (int i = 0; i < c.D; i++) out[row * c.D + i] += p * in.v.floats[key(j) * c.D + i];
      for (int i = 0; i < c.D; i++) d_v[key(j) * c.D + i] += p * in.d_out.floats[row * c.D + i];
      for (int i = 0; i < c.H; i++) d_q[row * c.H + i] += scale * d * in.k.floats[key(j) * c.H + i];
      for (int i = 0; i < c.H; i++) d_k[key(j) * c.H + i] += scale * d * in.q.floats[row * c.H + i];
    }
    r.row_sum.floats[row] = sum;
    for (int i = 0; i < c.D; i++) out[row * c.D + i] *= sum ? 1 / sum : 0;
  }
  narrow(r.out, out), narrow(r.d_q, d_q), narrow(r.d_k, d_k), narrow(r.d_v, d_v);
  return r;
}

struct Kernels {
  XLA_FFI_Handler *forward, *backward, *decode;
};

static Results computed(const Kernels& kernels, Pool& pool, const Case& c, Inputs in, int width) {
  Results r = results_of(c, c.parts);
  for (Array* x : {&r.out, &r.row_max, &r.row_sum, &r.d_q, &r.d_k, &r.d_v})
    std::fill(x->floats.begin(), x->floats.end(), NAN);  // all of it is written
  std::vector<Array*> args = in.operands(), rets = {&r.out, &r.row_max, &r.row_sum};
  if (c.T < 16) {
    Array scratch = Array::zeros({c.B, (c.S + 1023) / 1024, c.N * c.T, c.D + 2});
    rets.push_back(&scratch);
    call(kernels.decode, pool, args, rets, width);
  } else {
    call(kernels.forward, pool, args, rets, width);
  }
  args.insert(args.end(), {&r.row_max, &in.d_out, &in.d_sum});
  call(kernels.backward, pool, args, {&r.d_q, &r.d_k, &r.d_v}, width);
  for (Array* x : {&r.d_k, &r.d_v}) {  // the sum over the parts
    const long size = x->floats.size() / c.parts;
    for (int part = 1; part < c.parts; part++)
      for (long i = 0; i < size; i++) x->floats[i] += x->floats[part * size + i];
    x->floats.resize(size);
  }
  return r;
}

// How many of the results are further off than rounding.
static int compare(const Case& c, int width, const Results& got, const Results& wanted) {
  const char* names[] = {"out", "row_max", "row_sum", "d_query", "d_key", "d_value"};
  const Array Results::* members[] = {&Results::out, &Results::row_max, &Results::row_sum,
                                      &Results::d_q, &Results::d_k,     &Results::d_v};
  int wrong = 0;
  for (int m = 0; m < 6; m++) {
    const auto &x = (got.*members[m]).floats, &y = (wanted.*members[m]).floats;
    float largest = 1, error = 0;
    for (float one : y)
      if (one > -1e38f) largest = std::max(largest, std::abs(one));
    for (size_t i = 0; i < y.size(); i++) {
      const float off = x[i] == y[i] ? 0 : std::abs(x[i] - y[i]) / largest;
      if (error == error && !(off <= error)) error = off;  // NaN is the largest
    }
    if (error <= 2e-5f) continue;
    printf("%s, vectors of %d: %s is off by %.2g\n", c.name, width, names[m], error);
    wrong++;
  }
  return wrong;
}

int main(int count, char** args) {
  void* library = count == 2 ? dlopen(args[1], RTLD_NOW) : nullptr;
  if (!library) return printf("usage: driver LIBRARY\n%s\n", count == 2 ? dlerror() : ""), 2;
  auto handler = [&](const char* name) { return reinterpret_cast<XLA_FFI_Handler*>(dlsym(library, name)); };
  const Kernels kernels{handler("jattn_forward"), handler("jattn_backward"), handler("jattn_decode")};
  const int widest = reinterpret_cast<int (*)()>(dlsym(library, "widest"))();
  Pool pool(3);
  int wrong = 0, calls = 0;
  for (const Case& c : CASES) {
    const Inputs in = inputs_of(c);
    const Results wanted = formula(c, in);
    for (int width = 4; width <= widest; width *= 2, calls++) {
      const Results first = computed(kernels, pool, c, in, width);
      wrong += compare(c, width, first, wanted);
      // At the same time, from threads of their own: the same bits.
      std::vector<Results> others(2);
      std::vector<std::thread> threads;
      for (Results& other : others) threads.emplace_back([&] { other = computed(kernels, pool, c, in, width); });
      for (auto& thread : threads) thread.join();
      for (const Results& other : others)
        if (other.out.floats != first.out.floats || other.d_k.floats != first.d_k.floats)
          printf("%s, vectors of %d: other bits at the same time\n", c.name, width), wrong++;
    }
  }
  printf("%d cases, vectors of up to %d floats, %d wrong\n", calls, widest, wrong);
  return wrong != 0;
}

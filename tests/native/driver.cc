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

// What a query sees: keys in an interval of positions, and of those the ones with its id.
enum class Mask { full, causal, window, ragged, segments };
// What else there is.
enum : unsigned {
  SOFT_CAP = 1, ALIBI = 2, RELATIVE = 4, BIAS = 8, HIDDEN = 16, POSITIONS = 32, LENGTHS = 64, DROPOUT = 128,
  HALVES = 256  // bfloat16
};
struct Case {
  const char* name;
  int B, T, S, N, K, H, D;
  Mask mask = Mask::full;
  unsigned more = 0;
};
static const Case CASES[] = {
    {"one tile", 1, 5, 7, 1, 1, 16, 16},
    {"full", 2, 300, 133, 2, 2, 32, 48},
    {"causal, shared keys", 1, 520, 520, 4, 2, 48, 32, Mask::causal},
    {"one key head", 1, 1100, 300, 2, 1, 16, 16, Mask::causal},
    {"window, soft cap", 1, 290, 290, 2, 1, 64, 64, Mask::window, SOFT_CAP},
    {"ragged, alibi", 2, 140, 200, 2, 2, 32, 32, Mask::ragged, ALIBI | LENGTHS},
    {"segments, soft cap, bias", 2, 130, 130, 4, 2, 16, 32, Mask::segments, SOFT_CAP | BIAS},
    {"bias, mask array", 2, 150, 170, 4, 2, 32, 16, Mask::causal, BIAS | HIDDEN},
    {"relative bias, positions", 2, 140, 150, 2, 2, 16, 32, Mask::ragged, RELATIVE | POSITIONS},
    {"dropout", 2, 150, 140, 2, 1, 32, 32, Mask::causal, DROPOUT | POSITIONS | LENGTHS},
    {"largest head", 1, 70, 65, 1, 1, 256, 256, Mask::causal},
    {"bfloat16", 1, 260, 260, 2, 1, 64, 64, Mask::causal, HALVES | BIAS},
    {"bfloat16, full", 2, 301, 133, 4, 2, 48, 80, Mask::full, HALVES},
    {"bfloat16, window, soft cap", 1, 291, 293, 2, 2, 16, 16, Mask::window, HALVES | SOFT_CAP},
    {"bfloat16, ragged, alibi", 2, 140, 201, 2, 1, 32, 48, Mask::ragged, HALVES | ALIBI | LENGTHS},
    {"bfloat16, segments, dropout", 2, 131, 129, 4, 2, 80, 32, Mask::segments, HALVES | DROPOUT},
    {"bfloat16, mask array, positions", 2, 150, 171, 2, 2, 256, 16, Mask::causal, HALVES | HIDDEN | RELATIVE | POSITIONS},
    {"few, parts of the keys", 2, 3, 2100, 4, 2, 64, 64},
    {"few, ragged, soft cap", 2, 2, 1500, 2, 1, 32, 48, Mask::ragged, SOFT_CAP | ALIBI},
    {"few, segments, dropout", 1, 9, 300, 4, 4, 16, 16, Mask::segments, DROPOUT | LENGTHS},
    {"few, relative bias, mask array", 2, 3, 1100, 4, 2, 16, 16, Mask::window, RELATIVE | HIDDEN | POSITIONS},
    {"few, bfloat16", 2, 1, 1100, 6, 2, 64, 64, Mask::window, HALVES | BIAS},
    {"no keys", 1, 20, 0, 1, 1, 16, 16},
};
constexpr uint32_t DROPPED = 1u << 30;  // of 2^32

// jattn._core.dropout's hash.
static uint32_t mix(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352d, x = (x ^ (x >> 15)) * 0x846ca68b;
  return x ^ (x >> 16);
}

struct Inputs {
  Array q, k, v, inverse, d_out, delta, numbers = Array::zeros({3}), low, high, lengths, query_ids, key_ids, positions;
  Array key_positions, slopes, relative, bias, mask, seeds;
  std::vector<Array*> operands() {
    return {&numbers,       &low,    &high,     &lengths, &query_ids, &key_ids, &positions,
            &key_positions, &slopes, &relative, &bias,    &mask,      &seeds};
  }
  int position(const Case& c, int b, int j) const { return c.more & POSITIONS ? key_positions.ints[b * c.S + j] : j; }
  bool sees(const Case& c, int b, int h, int t, int j) const {
    const long ends = low.at(b, h, t, 0);
    const int key = position(c, b, j);
    return low.ints[ends] <= key && key <= high.ints[ends] && (!(c.more & LENGTHS) || j < lengths.ints[b]) &&
           (c.mask != Mask::segments || query_ids.ints[b * c.T + t] == key_ids.ints[b * c.S + j]) &&
           (!(c.more & HIDDEN) || mask.bytes[mask.at(b, h, t, j)]);
  }
  // 0, or what dropout multiplies by.
  double kept(const Case& c, int b, int h, int t, int j) const {
    if (!(c.more & DROPOUT)) return 1;
    const uint32_t query = positions.ints[b * c.T + t], key = position(c, b, j);
    const int* seed = &seeds.ints[(b * c.N + h) * 2];
    return mix(mix(mix(seed[0] ^ query) ^ key) + mix(seed[1] ^ query)) >= DROPPED ? numbers.floats[2] : 0;
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
  in.d_out = normal({c.B, c.T, c.N, c.D}), in.delta = normal({c.B, c.T, c.N});
  in.inverse = normal({c.B, c.T, c.N});
  for (float& one : in.inverse.floats) one = 0.1f + std::abs(one);
  in.numbers.floats = {0.3f, c.more & SOFT_CAP ? 3.0f : 0, 1 / 0.75f};
  // Some arrays have an axis of 1; those that there are not, no elements.
  auto if_any = [&](unsigned what, int size) { return (int64_t)(c.more & what ? size : 0); };
  const bool by_head = c.mask == Mask::ragged, segments = c.mask == Mask::segments;
  in.low = in.high = Array::of_ints({by_head ? c.B : 1, by_head ? c.N : 1, c.T, 1});
  in.query_ids = Array::of_ints({segments ? c.B : 0, c.T}), in.key_ids = Array::of_ints({segments ? c.B : 0, c.S});
  in.lengths = Array::of_ints({if_any(LENGTHS, c.B)});
  in.positions = Array::of_ints({if_any(ALIBI | RELATIVE | DROPOUT, c.B), c.T});
  in.key_positions = Array::of_ints({if_any(POSITIONS, c.B), c.S});
  in.slopes = normal({if_any(ALIBI, c.N)});
  in.relative = normal({if_any(RELATIVE, c.N), 2 * 20 + 1});
  in.bias = normal({if_any(BIAS, c.B), c.N, 1, c.S}), in.mask = Array::of_bytes({if_any(HIDDEN, 1), c.N, c.T, c.S});
  in.seeds = Array::of_ints({if_any(DROPOUT, c.B), c.N, 2});
  for (size_t i = 0; i < in.low.ints.size(); i++) {
    const int t = i % c.T + std::max(c.S - c.T, 0);
    int &low = in.low.ints[i], &high = in.high.ints[i];
    low = INT_MIN, high = INT_MAX;
    if (c.mask == Mask::causal) high = t;
    if (c.mask == Mask::window) low = t - 71, high = t + 3;  // at odd keys
    // Past both ends, empty, and nothing at all.
    if (c.mask == Mask::ragged) low = between(-40, c.S), high = between(0, c.S + 9);
    if (c.mask == Mask::ragged && i % 7 == 3) low = INT_MAX, high = INT_MIN;
  }
  for (size_t i = 0; i < in.query_ids.ints.size(); i++) in.query_ids.ints[i] = i % 50 > 40 ? -5 : (int)i / 20 * 3;
  for (size_t i = 0; i < in.key_ids.ints.size(); i++) in.key_ids.ints[i] = i % 50 > 40 ? -9 : (int)i / 20 * 3;
  for (size_t i = 0; i < in.positions.ints.size(); i++) in.positions.ints[i] = i % c.T * (i % 5 == 4 ? 2 : 1);
  for (size_t i = 0; i < in.key_positions.ints.size(); i++) in.key_positions.ints[i] = (i + 37) % c.S;  // rolling
  for (size_t i = 0; i < in.lengths.ints.size(); i++) in.lengths.ints[i] = i ? c.S - 11 : c.S + 5;
  for (float& slope : in.slopes.floats) slope *= 0.03f;
  for (auto& one : in.mask.bytes) one = random() % 3 > 0;
  for (int& seed : in.seeds.ints) seed = (int)random();
  if (c.more & HIDDEN) std::fill_n(in.mask.bytes.begin(), c.S, 0);  // a query that sees nothing
  for (int b = 0; b < c.B; b++)  // keys that nobody sees
    for (int j = 0; j < c.S; j++) {
      bool seen = false;
      for (int i = 0; i < c.T * c.N; i++) seen |= in.sees(c, b, i % c.N, i / c.N, j);
      for (Array* x : {&in.k, &in.v}) {
        const long size = x->dims[2] * x->dims[3];
        if (!seen) std::fill_n(x->floats.begin() + (b * c.S + j) * size, size, NAN);
      }
    }
  if (c.more & HALVES)
    for (Array* x : {&in.q, &in.k, &in.v}) x->shorten();
  if (c.more & HALVES && c.more & BIAS) in.bias.shorten();
  return in;
}

struct Results {
  Array out, row_max, row_sum, d_q, d_k, d_v, totals;
};

static Results results_of(const Case& c) {
  return {Array::zeros({c.B, c.T, c.N, c.D}), Array::zeros({c.B, c.T, c.N}),
          Array::zeros({c.B, c.T, c.N}),      Array::zeros({c.B, c.T, c.N, c.H}),
          Array::zeros({1, c.B, c.S, c.K, c.H}), Array::zeros({1, c.B, c.S, c.K, c.D}),
          Array::zeros({c.B, c.T, c.N})};
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
    double max = -3.4028234663852886e38, sum = 0, total = 0;
    auto key = [&](int j) { return ((long)b * c.S + j) * c.K + h / (c.N / c.K); };
    for (int j = 0; j < c.S; j++) {
      if (!in.sees(c, b, h, t, j)) continue;
      score[j] = scale * product(in.q.floats, row, in.k.floats, key(j), c.H);
      if (c.more & BIAS) score[j] += in.bias.floats[in.bias.at(b, h, t, j)];
      if (c.more & SOFT_CAP) {
        const double cap = in.numbers.floats[1], bent = std::tanh(score[j] / cap);
        score[j] = cap * bent, slope[j] = 1 - bent * bent;
      }
      const int distance = c.more & (ALIBI | RELATIVE) ? in.positions.ints[b * c.T + t] - in.position(c, b, j) : 0;
      if (c.more & ALIBI) score[j] -= in.slopes.floats[h] * std::abs(distance);
      if (c.more & RELATIVE) score[j] += in.relative.floats[h * 41 + 20 + std::min(std::max(distance, -20), 20)];
      max = std::max(max, score[j]);
    }
    r.row_max.floats[row] = max;
    for (int j = 0; j < c.S; j++) {
      if (!in.sees(c, b, h, t, j)) continue;
      const double p = std::exp(score[j] - r.row_max.floats[row]), kept = p * in.kept(c, b, h, t, j);
      const double of_out = product(in.d_out.floats, row, in.v.floats, key(j), c.D);
      const double inverse = in.inverse.floats[row], d = (kept * of_out + p * in.delta.floats[row]) * inverse * slope[j];
      sum += p, total += d;
      for (int i = 0; i < c.D; i++) out[row * c.D + i] += kept * in.v.floats[key(j) * c.D + i];
      for (int i = 0; i < c.D; i++) d_v[key(j) * c.D + i] += kept * inverse * in.d_out.floats[row * c.D + i];
      for (int i = 0; i < c.H; i++) d_q[row * c.H + i] += scale * d * in.k.floats[key(j) * c.H + i];
      for (int i = 0; i < c.H; i++) d_k[key(j) * c.H + i] += scale * d * in.q.floats[row * c.H + i];
    }
    r.row_sum.floats[row] = sum, r.totals.floats[row] = total;
    for (int i = 0; i < c.D; i++) out[row * c.D + i] *= sum ? 1 / sum : 0;
  }
  narrow(r.out, out), narrow(r.d_q, d_q), narrow(r.d_k, d_k), narrow(r.d_v, d_v);
  return r;
}

struct Kernels {
  XLA_FFI_Handler *forward, *backward, *decode;
};

// [3,B,S,K,width], of which `x` is the second; the others are NaN.
static Array among_layers(const Array& x) {
  Array all = x;
  all.dims.insert(all.dims.begin(), 3);
  all.floats.assign(3 * x.floats.size(), NAN), all.halves.assign(3 * x.halves.size(), 0x7fc0);
  std::copy(x.floats.begin(), x.floats.end(), all.floats.begin() + x.floats.size());
  std::copy(x.halves.begin(), x.halves.end(), all.halves.begin() + x.halves.size());
  return all;
}

static Results computed(const Kernels& kernels, Pool& pool, const Case& c, Inputs in, int width, bool in_float32) {
  Results r = results_of(c);
  for (Array* x : {&r.out, &r.row_max, &r.row_sum, &r.d_q, &r.d_k, &r.d_v, &r.totals})
    std::fill(x->floats.begin(), x->floats.end(), NAN);  // all of it is written
  std::vector<Array*> args = {&in.q, &in.k, &in.v}, rest = in.operands(), rets = {&r.out, &r.row_max, &r.row_sum};
  args.insert(args.end(), rest.begin(), rest.end());
  Array scratch = Array::zeros({c.B, (c.S + 1023) / 1024, c.N * c.T, c.D + 2});
  Array layer = Array::of_ints({}), keys = among_layers(in.k), values = among_layers(in.v);
  layer.ints = {c.B > 1 ? 1 : 0};
  if (c.T < 16) {  // with the keys of one layer, or of all
    std::vector<Array*> decoded = args;
    if (c.B > 1) decoded[1] = &keys, decoded[2] = &values;
    decoded.insert(decoded.begin() + 3, &layer), rets.push_back(&scratch);
    call(kernels.decode, pool, decoded, rets, width, DROPPED, in_float32);
  } else {
    call(kernels.forward, pool, args, rets, width, DROPPED, in_float32);
  }
  args.insert(args.begin() + 3, {&r.row_max, &in.inverse, &in.d_out, &in.delta});
  call(kernels.backward, pool, args, {&r.d_q, &r.d_k, &r.d_v, &r.totals}, width, DROPPED, in_float32);
  return r;
}

// How many of the results are further off than rounding.
static int compare(const Case& c, int width, bool in_float32, const Results& got, const Results& wanted) {
  const char* names[] = {"out", "row_max", "row_sum", "d_query", "d_key", "d_value", "totals"};
  const Array Results::* members[] = {&Results::out, &Results::row_max, &Results::row_sum,
                                      &Results::d_q, &Results::d_k,     &Results::d_v, &Results::totals};
  int wrong = 0;
  const int count = c.more & HALVES && !(c.more & SOFT_CAP) ? 7 : 6;
  for (int m = 0; m < count; m++) {
    const auto &x = (got.*members[m]).floats, &y = (wanted.*members[m]).floats;
    float largest = 1, error = 0;
    for (float one : y)
      if (one > -1e38f) largest = std::max(largest, std::abs(one));
    for (size_t i = 0; i < y.size(); i++) {
      const float off = x[i] == y[i] ? 0 : std::abs(x[i] - y[i]) / largest;
      if (error == error && !(off <= error)) error = off;  // NaN is the largest
    }
    const bool rounds = !in_float32 && m != 1 && m != 2;  // factors to bfloat16
    if (error <= (rounds ? 1e-2f : 2e-5f)) continue;
    printf("%s, vectors of %d%s: %s is off by %.2g\n", c.name, width, in_float32 ? "" : ", bfloat16", names[m], error);
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
  const bool halves = reinterpret_cast<int (*)()>(dlsym(library, "has_bfloat16_products"))();
  Pool pool(3);
  int wrong = 0, calls = 0;
  for (const Case& c : CASES) {
    const Inputs in = inputs_of(c);
    const Results wanted = formula(c, in);
    // After the last width once more with products of bfloat16, if there are any.
    for (int way = 4; way <= (halves && c.more & HALVES ? 2 * widest : widest); way *= 2, calls++) {
      const int width = std::min(way, widest);
      const bool in_float32 = way <= widest;
      const Results first = computed(kernels, pool, c, in, width, in_float32);
      wrong += compare(c, width, in_float32, first, wanted);
      // At the same time, from threads of their own: the same bits.
      std::vector<Results> others(2);
      std::vector<std::thread> threads;
      for (Results& other : others) threads.emplace_back([&] { other = computed(kernels, pool, c, in, width, in_float32); });
      for (auto& thread : threads) thread.join();
      for (const Results& other : others)
        if (other.out.floats != first.out.floats || other.d_k.floats != first.d_k.floats)
          printf("%s, vectors of %d: other bits at the same time\n", c.name, width), wrong++;
    }
  }
  printf("%d cases, vectors of up to %d floats%s, %d wrong\n", calls, widest, halves ? ", of bfloat16, too" : "", wrong);
  return wrong != 0;
}

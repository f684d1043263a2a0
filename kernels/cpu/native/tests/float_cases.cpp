// The quantisers on awkward numbers, argmax on ties, fp64 exp and noise of sampling, and the sum
// that measures bandwidth.
#include <cfloat>
#include <cmath>
#include <limits>

#include "check.h"
#include "scalar.h"

namespace check {

namespace {

using scalar::Floats;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kEps = 1e-5f;
const float kAwkward[] = {0.0f,      -0.0f,      0x1p-149f, -0x1p-149f, 0x1.8p-127f, FLT_MIN,
                          0x1p-101f, -0x1p-100f, 0x1p-99f,  0.5f,       -1.0f,       126.5f,
                          -87.0f,    88.0f,      1e30f,     -1e30f,     FLT_MAX,     -FLT_MAX,
                          kInfinity, -kInfinity, NAN};

enum Kind { kQuantise, kNorm };
const char* const kNames[] = {"quantise", "norm_quantise"};

// codes of one row in blocks of `interleave`, and nothing else
void check_codes(const scalar::Quantised& want, int n, int G, int row, Output<int8_t>& codes,
                 Output<int32_t>& sums, const edge::Activation& a, int rows,
                 const std::string& where, Report& report) {
  bool others = codes.intact() && sums.intact();
  for (int m = 0; m < rows; m++)
    for (int k = 0; k < a.stride; k++) {
      const int I = a.interleave, at = m / I * I * a.stride + (k / 4 * I + m % I) * 4 + k % 4;
      const int8_t code = codes[size_t(at)];
      if (m != row)
        others = others && codes.untouched(code);
      else if (want.finite)
        report.same(code, k < n ? want.codes[size_t(k)] : 0, where, " code");
    }
  for (int g = 0; g < a.groups && want.finite; g++) {
    int sum = 0;
    for (int k = g * G; k < (g + 1) * G && k < n; k++) sum += want.codes[size_t(k)];
    report.same(sums[size_t(row * a.groups + g)], sum, where, " sum");
  }
  report.holds(others, where, " writes outside");
}

void one(const edge::Isa& isa, Kind kind, const Floats& x, int n, int G, Report& report) {
  const int interleave = (n + G) % 2 ? 1 : G == 32 ? 4 : 8;
  const int groups = (n + G - 1) / G, stride = groups * G, rows = 2 * interleave;
  const int row = interleave == 1 ? 1 : interleave + 2;
  Output<int8_t> codes(size_t(rows * stride));
  Output<float> scale(static_cast<size_t>(rows));
  Output<int32_t> sums(size_t(rows * groups));
  const edge::Activation a{codes.data(), scale.data(), sums.data(), stride, groups, interleave};
  const Input<float> in(x);
  Floats y = x;
  if (kind == kQuantise) {
    isa.quantise(in.data(), n, row, G, a);
  } else {
    isa.norm_quantise(in.data(), n, kEps, row, G, a);
    y = scalar::rms_norm(x, kEps);
  }
  const scalar::Quantised want = scalar::quantise(y);
  const std::string where =
      std::string(kNames[kind]) + " n " + std::to_string(n) + " G " + std::to_string(G);
  if (want.finite)
    report.same_float(scale[size_t(row)], want.scale, where, " scale");
  else
    report.holds(!std::isfinite(scale[size_t(row)]), where, " makes a finite scale of what is not");
  bool others = scale.intact();
  for (int m = 0; m < rows; m++) others = others && (m == row || scale.untouched(scale[size_t(m)]));
  report.holds(others, where, " writes another scale");
  check_codes(want, n, G, row, codes, sums, a, rows, where, report);
  report.next_case();
}

// values where a reciprocal instead of a division, or a fused product, would show
Floats near_ties(Random& random, int n) {
  Floats x{0.5f + std::fabs(random.unit())};
  while (int(x.size()) < n) {
    float v = x[0] * ((float(random.between(0, 126)) + 0.5f) / 127.0f);
    for (int step = random.between(-1, 1); step; step = 0)
      v = std::nextafter(v, step > 0 ? 9.0f : 0.0f);
    x.push_back(v);
  }
  return x;
}

}  // namespace

void quantiser_cases(const edge::Isa& isa, Report& report) {
  Random random(1);
  for (int kind : {kQuantise, kNorm})
    for (int n : {1, 7, 16, 31, 32, 33, 64, 100, 576}) {
      for (int G : {32, 64, 128}) {
        for (float scale : {1.0f, 1e-6f, 6e4f, 0x1p-110f, 0x1p-140f, 1e30f, 3e38f, 30.0f})
          one(isa, Kind(kind), random.floats(n, scale), n, G, report);
        if (kind == kQuantise) one(isa, kQuantise, near_ties(random, n), n, G, report);
      }
      for (float special : kAwkward) {
        one(isa, Kind(kind), Floats(size_t(n), special), n, 64, report);
        Floats x = random.floats(n);
        for (int i : {0, n / 2, n - 1}) {
          x[size_t(i)] = special;
          one(isa, Kind(kind), x, n, 32, report);
        }
      }
    }
}

void silu_cases(const edge::Isa& isa, Report& report) {
  Random random(7);
  auto one = [&](const Floats& gate, const Floats& up) {
    const int n = int(gate.size());
    const Floats want = scalar::silu_mul(gate, up);
    const Input<float> g(gate), u(up);
    Output<float> out(gate.size());
    isa.silu_mul(g.data(), u.data(), n, out.data());
    for (int i = 0; i < n; i++) {
      const float got = out[size_t(i)], right = want[size_t(i)];
      const std::string where = "n " + std::to_string(n) + " at " + std::to_string(i);
      if (std::isnan(right))
        report.holds(std::isnan(got), where, " is not NaN");
      else
        report.same_float(got, right, where);
    }
    report.holds(out.intact(), "n " + std::to_string(n), " writes outside");
    report.next_case();
  };
  for (int n : {1, 7, 16, 31, 32, 33, 64, 100, 576})
    for (float scale : {1.0f, 1e-6f, 0x1p-140f, 30.0f, 3e38f}) {
      const Floats gate = random.floats(n, scale);
      one(gate, random.floats(n, scale));
    }
  Floats gate, up;  // every pair
  for (float g : kAwkward)
    for (float u : kAwkward) gate.push_back(g), up.push_back(u);
  one(gate, up);
}

void argmax_cases(const edge::Isa& isa, Report& report) {
  Random random(2);
  for (int n : {1, 2, 15, 16, 17, 100, 1000})
    for (int kind = 0; kind < 8; kind++) {
      Floats x = random.floats(n, kind == 1 ? 0x1p-140f : 10.0f);
      const size_t first = size_t(random.between(0, n - 1)),
                   last = size_t(random.between(0, n - 1));
      if (kind == 2) x.assign(size_t(n), -3.0f);
      if (kind == 3) x[first] = x[last] = 11.0f;
      if (kind == 4)
        for (float& v : x) v = random.between(0, 1) ? 0.0f : -0.0f;
      if (kind == 5) x[last] = NAN;
      if (kind == 6) x[last] = -kInfinity;
      if (kind == 7) x[last] = kInfinity;
      bool finite = true, found = false;
      int want = 0;
      for (int i = 0; i < n; i++) {
        finite = finite && std::isfinite(x[size_t(i)]);
        if (x[size_t(i)] > x[size_t(want)]) want = i;
      }
      Output<float> best(1);
      Output<int32_t> index(1);
      const Input<float> in(x);
      isa.argmax(in.data(), n, best.data(), index.data(), &found);
      const std::string where = "n " + std::to_string(n) + " kind " + std::to_string(kind);
      report.same(found, finite, where, " finite");
      if (finite) report.same_float(best[0], x[size_t(want)], where);
      if (finite) report.same(index[0], want, where);
      report.holds(best.intact() && index.intact(), where, " writes outside");
      report.next_case();
    }
}

void sampling_cases(const edge::Isa& isa, Report& report) {
  Random random(6);
  for (int n : {1, 7, 63, 64, 65, 200})
    for (double scale : {1.0, 40.0, 800.0, 1e-12}) {
      std::vector<double> x{0.0,       -0.0, -700.0, -700.0000001, -1e300, -double(kInfinity),
                            -0x1p-1074};
      while (int(x.size()) < n) x.push_back(-std::fabs(double(random.unit())) * scale);
      x.resize(static_cast<size_t>(n));
      Output<double> out(x.size());
      std::memcpy(out.data(), x.data(), x.size() * sizeof(double));
      isa.exp64(out.data(), n, out.data());
      for (size_t i = 0; i < x.size(); i++)
        report.same_double(out[i], scalar::exp64(x[i]), "exp64 of " + std::to_string(x[i]));
      std::vector<int32_t> ids;
      for (int i = 0; i < n; i++) ids.push_back(random.between(0, 0x7fffffff));
      const uint64_t seed = random.bits(), position = n % 2 ? random.bits() : uint64_t(n);
      isa.gumbel(seed, position, Input<int32_t>(ids).data(), n, out.data());
      for (size_t i = 0; i < x.size(); i++)
        report.same_double(out[i], scalar::gumbel(seed, position, uint32_t(ids[i])), "gumbel");
      report.holds(out.intact(), "sampling writes outside");
      report.next_case();
    }
}

void checksum_cases(const edge::Isa& isa, Report& report) {
  Random random(3);
  for (int bytes : {0, 127, 128, 1000, 65536}) {
    std::vector<uint8_t> data(static_cast<size_t>(bytes));
    for (uint8_t& b : data) b = uint8_t(random.bits());
    uint64_t want = 0;
    for (int i = 0; i < bytes / 128 * 128; i++) want += uint64_t(data[size_t(i)]) << (8 * (i % 8));
    report.same(int64_t(isa.checksum(Input<uint8_t>(data).data(), bytes)), int64_t(want), "sum");
    report.next_case();
  }
}

}  // namespace check

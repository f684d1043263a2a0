// Linears against int64: odd sizes, padding that holds anything, and the ends of every range.
#include <cmath>
#include <optional>

#include "check.h"
#include "scalar.h"

namespace check {

namespace {

using edge::kTile;

enum Codes { kAnyCode, kLargest, kSmallest, kLowestRefine, kZeroCode, kNumCodes };
enum Activations { kAny, kPlus, kMinus, kAlternating, kNumActivations };
enum Multipliers { kMixed, kMost, kLeast, kNumMultipliers };

struct Shape {
  int N, K, Kp, G;
};

struct Pattern {
  Codes codes;
  Activations activations;
  Multipliers multipliers;
};

constexpr int kMaxRows = 17;

struct Case {
  Shape s;
  std::vector<int> q4, qr, mult, x;  // [N][Kp], [N][Kp], [N][Kp/G], [kMaxRows][Kp]
  std::vector<float> scale, bias, x_scale;
};

void choose_code(Random& random, Codes codes, int& q4, int& qr) {
  switch (codes) {
    case kLargest: q4 = qr = 7; return;
    case kSmallest: q4 = -8, qr = 0; return;
    case kLowestRefine: q4 = -7, qr = -8; return;
    case kZeroCode: q4 = qr = 0; return;
    default: q4 = random.between(-8, 7), qr = random.between(q4 == -8 ? 0 : -8, 7);
  }
}

int choose_activation(Random& random, Activations a, int k) {
  if (a == kAny) return random.between(-127, 127);
  return a == kPlus || (a == kAlternating && k % 2) ? 127 : -127;
}

int choose_multiplier(Random& random, Multipliers m) {
  const int special[] = {0, 1, -1, 32767, -32768};
  if (m == kMixed)
    return random.between(0, 2) ? random.between(-32768, 32767) : special[random.between(0, 4)];
  return m == kMost ? 32767 : -32768;
}

Case make(const Shape& s, const Pattern& p, uint64_t seed) {
  Random random(seed);
  Case c{s, {}, {}, {}, {}, {}, {}, {}};
  for (int i = 0; i < s.N * s.Kp; i++) {
    int q4, qr;
    choose_code(random, p.codes, q4, qr);
    c.q4.push_back(q4), c.qr.push_back(qr);
  }
  for (int i = 0; i < s.N * (s.Kp / s.G); i++)
    c.mult.push_back(choose_multiplier(random, p.multipliers));
  for (int i = 0; i < kMaxRows * s.Kp; i++)
    c.x.push_back(i % s.Kp < s.K ? choose_activation(random, p.activations, i % s.Kp) : 0);
  c.scale = random.floats(s.N, 1e-6f), c.bias = random.floats(s.N, 10);
  for (int m = 0; m < kMaxRows; m++) c.x_scale.push_back(std::fabs(random.unit()));
  c.x_scale[2] = 0, c.x_scale[4] = 0x1p-126f, c.x_scale[5] = NAN;
  c.scale[0] = 0x1p-130f;
  return c;
}

// y of one row before the residual
std::vector<float> expected(const Case& c, bool w8, int m, bool bias) {
  const int groups = c.s.Kp / c.s.G;
  std::vector<float> y;
  for (int n = 0; n < c.s.N; n++) {
    int64_t acc = 0;
    for (int k = 0; k < c.s.Kp; k++) {
      const size_t at = size_t(n) * size_t(c.s.Kp) + size_t(k);
      const int64_t code = 16 * c.q4[at] + (w8 ? c.qr[at] : 0);
      acc += c.mult[size_t(n * groups + k / c.s.G)] * code * c.x[size_t(m * c.s.Kp + k)];
    }
    const float value = (float(acc) * c.x_scale[size_t(m)]) * c.scale[size_t(n)];
    y.push_back(bias ? value + c.bias[size_t(n)] : value);
  }
  return y;
}

// The case as a kernel takes it; whatever does not count holds garbage.
class Planes {
 public:
  Planes(const Case& c, int rows_of_x, int interleave) {
    const Shape& s = c.s;
    Random random(7);
    const int rows = (s.N + kTile - 1) / kTile * kTile, groups = s.Kp / s.G;
    std::vector<uint8_t> base(size_t(rows * s.Kp / 2)), refine(base.size());
    for (uint8_t& b : base) b = uint8_t(random.bits());
    for (uint8_t& b : refine) b = uint8_t(random.bits());
    std::vector<int16_t> mult(size_t(rows * groups));
    for (int16_t& m : mult) m = int16_t(random.bits());
    for (int n = 0; n < s.N; n++) {
      for (int k = 0; k < s.Kp; k++) {
        const scalar::Place p = scalar::place(kTile, s.Kp, s.G, n, k);
        const size_t from = size_t(n) * size_t(s.Kp) + size_t(k), to = size_t(p.byte);
        base[to] = uint8_t((base[to] & (0xf0 >> p.shift)) | ((c.q4[from] + 8) << p.shift));
        refine[to] = uint8_t((refine[to] & (0xf0 >> p.shift)) | ((c.qr[from] + 8) << p.shift));
      }
      for (int g = 0; g < groups; g++)
        mult[size_t((n / kTile * groups + g) * kTile + n % kTile)] =
            int16_t(c.mult[size_t(n * groups + g)]);
    }
    std::vector<float> scale = c.scale, bias = c.bias;
    scale.resize(size_t(rows), NAN), bias.resize(size_t(rows), NAN);
    const int I = interleave, blocks = (rows_of_x + I - 1) / I;
    std::vector<int8_t> codes(size_t(blocks * I * s.Kp));
    for (int8_t& code : codes) code = int8_t(random.between(-127, 127));
    std::vector<int32_t> sums(size_t(rows_of_x * groups));
    for (int m = 0; m < rows_of_x; m++)
      for (int k = 0; k < s.Kp; k++) {
        const int x = c.x[size_t(m * s.Kp + k)];
        codes[size_t(m / I * I * s.Kp + (k / 4 * I + m % I) * 4 + k % 4)] = int8_t(x);
        sums[size_t(m * groups + k / s.G)] += x;
      }
    const std::vector<float> x_scale(c.x_scale.begin(), c.x_scale.begin() + rows_of_x);
    base_.emplace(base), refine_.emplace(refine), mult_.emplace(mult), scale_.emplace(scale);
    bias_.emplace(bias), codes_.emplace(codes), x_scale_.emplace(x_scale), sums_.emplace(sums);
    linear.base = base_->data(), linear.refine = refine_->data(), linear.mult = mult_->data();
    linear.scale = scale_->data(), linear.bias = bias_->data();
    linear.N = s.N, linear.K = s.K, linear.Kp = s.Kp, linear.G = s.G;
    activation = {codes_->data(), x_scale_->data(), sums_->data(), s.Kp, groups, I};
  }

  edge::Linear linear{};
  edge::Activation activation{};

 private:
  std::optional<Input<uint8_t>> base_, refine_;
  std::optional<Input<int16_t>> mult_;
  std::optional<Input<float>> scale_, bias_, x_scale_;
  std::optional<Input<int8_t>> codes_;
  std::optional<Input<int32_t>> sums_;
};

std::string name(const Case& c, bool w8, int rows) {
  return std::string(w8 ? "w8" : "w4") + " N " + std::to_string(c.s.N) + " K " +
         std::to_string(c.s.K) + " G " + std::to_string(c.s.G) + " rows " + std::to_string(rows);
}

// the first `rows` rows in two calls that share the tiles, into rows that are wider than N
void run(const edge::Isa& isa, const Case& c, bool w8, int rows, bool bias, bool residual,
         const std::vector<std::vector<float>>& want, Report& report) {
  const Planes planes(c, rows, rows == 1 ? 1 : isa.interleave);
  edge::Linear L = planes.linear;
  if (!bias) L.bias = nullptr;
  const int stride = c.s.N + 3, tiles = (c.s.N + kTile - 1) / kTile, middle = tiles / 2;
  Random random{uint64_t(rows)};
  const Input<float> rest(random.floats(rows * stride));
  Output<float> y(size_t(rows * stride));
  const float* add = residual ? rest.data() : nullptr;
  isa.linear(L, w8, planes.activation, rows, middle, tiles, y.data(), stride, add);
  isa.linear(L, w8, planes.activation, rows, 0, middle, y.data(), stride, add);
  const std::string where = name(c, w8, rows);
  for (int m = 0; m < rows; m++)
    for (int n = 0; n < stride; n++) {
      const size_t at = size_t(m * stride + n);
      if (n >= c.s.N) {
        report.holds(y.untouched(y[at]), where, " writes behind a row");
        continue;
      }
      const float value = want[size_t(m)][size_t(n)];
      report.same_float(y[at], residual ? rest.data()[at] + value : value, where);
    }
  report.holds(y.intact(), where, " writes outside");
  report.next_case();
}

}  // namespace

void linear_cases(const edge::Isa& isa, Report& report) {
  const Shape shapes[] = {{0, 576, 576, 64}, {0, 200, 256, 128}, {0, 96, 96, 32}};
  for (Shape s : shapes)
    for (int N : {1, 15, 16, 17, 31, 33, 100})
      for (bool w8 : {false, true}) {
        s.N = N;
        const bool bias = N % 2;
        const Case c = make(s, {kAnyCode, kAny, kMixed}, uint64_t(N + s.K));
        std::vector<std::vector<float>> want;
        for (int m = 0; m < kMaxRows; m++) want.push_back(expected(c, w8, m, bias));
        for (int rows = 1; rows <= kMaxRows; rows++)
          run(isa, c, w8, rows, bias, rows % 3, want, report);
      }
  for (Shape s : {Shape{17, 576, 576, 64}, {17, 1024, 1024, 128}, {17, 96, 96, 32}})
    for (int p = 0; p < kNumCodes * kNumActivations * kNumMultipliers; p++)
      for (bool w8 : {false, true}) {
        const Case c = make(s,
                            {Codes(p % kNumCodes), Activations(p / kNumCodes % kNumActivations),
                             Multipliers(p / kNumCodes / kNumActivations)},
                            uint64_t(p));
        std::vector<std::vector<float>> want;
        for (int m = 0; m < 8; m++) want.push_back(expected(c, w8, m, true));
        for (int rows : {1, 3, 8}) run(isa, c, w8, rows, true, false, want, report);
      }
}

}  // namespace check

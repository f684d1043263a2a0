#include "scalar.h"

#include <cmath>
#include <cstring>
#include <limits>

namespace scalar {

namespace {
constexpr float kTiny = 0x1p-100f, kInfinity = std::numeric_limits<float>::infinity();
}

float round_even(float x) { return std::nearbyint(x); }

float exp_nonpositive(float x) {
  if (x < -87.0f) return 0.0f;
  const float n = round_even(x * 1.4426950408889634f);
  const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  const float c[] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
                     4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
  float p = c[0];
  for (int i = 1; i < 6; i++) p = p * r + c[i];
  const float y = ((p * (r * r)) + r) + 1.0f;
  return x != x ? x : y * std::ldexp(1.0f, int(n));
}

float lane_sum(const Floats& x) {
  Floats lanes(32, 0.0f);
  for (size_t i = 0; i < x.size(); i++) lanes[i % 32] = i < 32 ? 0.0f + x[i] : lanes[i % 32] + x[i];
  for (size_t width = 16; width; width /= 2)
    for (size_t i = 0; i < width; i++) lanes[i] = lanes[i] + lanes[i + width];
  return lanes[0];
}

Quantised quantise(const Floats& x) {
  float peak = 0;
  bool finite = true;
  for (float v : x) {
    finite = finite && std::isfinite(v);
    peak = std::fmax(peak, std::fabs(v));
  }
  if (peak < kTiny) peak = 0;
  const float inverse = peak > 0 ? 127.0f / peak : 0.0f;
  Quantised result{{}, peak / 127.0f, finite};
  for (float v : x) {
    const float c = round_even(v * inverse);
    result.codes.push_back(!finite ? 0 : int(std::fmin(std::fmax(c, -127.0f), 127.0f)));
  }
  return result;
}

Floats rms_norm(const Floats& x, float eps) {
  Floats squares, y;
  for (float v : x) squares.push_back(v * v);
  const float factor = 1.0f / std::sqrt(lane_sum(squares) / float(x.size()) + eps);
  for (float v : x) y.push_back(v * factor);
  return y;
}

Floats silu_mul(const Floats& gate, const Floats& up) {
  Floats y;
  for (size_t i = 0; i < gate.size(); i++) {
    const float g = gate[i], e = exp_nonpositive(-std::fabs(g));
    const float s = (g >= 0 ? 1.0f : e) / (1.0f + e);
    y.push_back((g * s) * up[i]);
  }
  return y;
}

float half_value(uint16_t half) {
  const int exponent = (half >> 10) & 31, low = half & 1023;
  float value =
      exponent ? std::ldexp(float(1024 + low), exponent - 25) : std::ldexp(float(low), -24);
  if (exponent == 31) value = low ? std::nanf("") : kInfinity;
  return half & 0x8000 ? -value : value;
}

Nested nest(const Floats& x) {
  float peak = 0;
  for (float v : x) peak = std::fmax(peak, std::fabs(v));
  peak = peak / 7.4375f;
  int low = 0, high = 0x7bff;  // the first half that is not below the peak
  while (low < high) {
    const int middle = (low + high) / 2;
    if (half_value(uint16_t(middle)) >= peak)
      high = middle;
    else
      low = middle + 1;
  }
  Nested result{{}, {}, uint16_t(low)};
  const float scale = low ? half_value(result.scale) : 1.0f, step = scale / 16.0f;
  for (float v : x) {
    const float q4 = std::fmin(std::fmax(round_even(v / scale), -8.0f), 7.0f);
    const float qr = round_even((v - q4 * scale) / step), least = q4 == -8.0f ? 0.0f : -8.0f;
    result.q4.push_back(int(q4));
    result.qr.push_back(int(std::fmin(std::fmax(qr, least), 7.0f)));
  }
  return result;
}

Floats rotate(Floats x, const float* norm, float eps, const float* cos, const float* sin,
              float scale) {
  const size_t D = x.size(), half = D / 2;
  if (norm) {
    x = rms_norm(x, eps);
    for (size_t i = 0; i < D; i++) x[i] = x[i] * norm[i];
  }
  Floats y(D);
  for (size_t i = 0; i < half; i++) {
    y[i] = x[i] * cos[i] - x[i + half] * sin[i];
    y[i + half] = x[i + half] * cos[i] + x[i] * sin[i];
  }
  if (scale == 0) return y;
  for (size_t stride = 1; stride < D; stride *= 2) {
    const Floats from = y;
    for (size_t i = 0; i < D; i++)
      y[i] = i & stride ? from[i - stride] - from[i] : from[i] + from[i + stride];
  }
  for (float& v : y) v = v * scale;
  return y;
}

Partial attend(const Floats& q, const Block& block, float softmax_scale) {
  const Quantised query = quantise(q);
  const float factor = query.scale * softmax_scale;
  const size_t D = q.size();
  Floats s(64, -kInfinity), p(64), w(64, 0.0f);
  float most = -kInfinity, peak = 0;
  for (size_t t = 0; t < size_t(block.visible); t++) {
    int64_t dot = 0;
    for (size_t d = 0; d < D; d++) dot += int64_t(query.codes[d]) * block.k[t][d];
    s[t] = (float(dot) * factor) * (block.ks[t] / 16.0f);
    most = std::fmax(most, s[t]);
  }
  for (size_t t = 0; t < 64; t++) p[t] = exp_nonpositive(s[t] - std::fmax(most, -3e38f));
  for (size_t t = 0; t < size_t(block.visible); t++) {
    w[t] = p[t] * (block.vs[t] / 16.0f);
    peak = std::fmax(peak, w[t]);
  }
  if (peak < kTiny) peak = 0;
  const float inverse = peak > 0 ? 32767.0f / peak : 0.0f, step = peak / 32767.0f;
  Partial result{most, lane_sum(p), Floats(D)};
  for (size_t d = 0; d < D; d++) {
    int64_t sum = 0;
    for (size_t t = 0; t < size_t(block.visible); t++)
      sum += int64_t(round_even(w[t] * inverse)) * block.v[t][d];
    result.out[d] = float(sum) * step;
  }
  return result;
}

Floats combine(const std::vector<Partial>& blocks) {
  float most = -kInfinity, total = 0;
  for (const Partial& b : blocks) most = std::fmax(most, b.most);
  Floats sum(blocks[0].out.size(), 0.0f);
  for (const Partial& b : blocks) {
    const float c = exp_nonpositive(b.most - most);
    for (size_t d = 0; d < sum.size(); d++) sum[d] = sum[d] + b.out[d] * c;
    total = total + b.sum * c;
  }
  for (float& v : sum) v = v / total;
  return sum;
}

Place place(int tile_rows, int Kp, int G, int row, int k) {
  const int group = k / G, in_half = k % G % (G / 2), chunk = group * (G / 8) + in_half / 4;
  const int64_t tile = row / tile_rows;
  return {((tile * (Kp / 8) + chunk) * tile_rows + row % tile_rows) * 4 + in_half % 4,
          k % G < G / 2 ? 0 : 4};
}

namespace {
constexpr double kLn2 = 0x1.62e42fefa39efp-1;

double log64(double x) {
  int exponent;
  double m = std::frexp(x, &exponent);
  if (m < 0.7071067811865476) m = m * 2.0, exponent--;
  const double s = (m - 1.0) / (m + 1.0), z = s * s;
  double total = 1.0 / 25.0;
  for (int k = 23; k > 0; k -= 2) total = total * z + 1.0 / double(k);
  return double(exponent) * kLn2 + 2.0 * s * total;
}
}  // namespace

double exp64(double x) {
  if (x < -700.0) return 0.0;
  const double whole = std::nearbyint(x / kLn2), r = x - whole * kLn2;
  double total = 1.0;
  for (int k = 14; k > 0; k--) total = total * r / double(k) + 1.0;
  return std::ldexp(total, int(whole));
}

double gumbel(uint64_t seed, uint64_t position, uint32_t id) {
  uint32_t c[4] = {uint32_t(position), uint32_t(position >> 32), id, 0};
  uint32_t key[2] = {uint32_t(seed), uint32_t(seed >> 32)};
  for (int round = 0; round < 10; round++) {  // Philox4x32 (Salmon et al. 2011)
    const uint64_t p0 = uint64_t(0xd2511f53u) * c[0], p1 = uint64_t(0xcd9e8d57u) * c[2];
    const uint32_t next[4] = {uint32_t(p1 >> 32) ^ c[1] ^ key[0], uint32_t(p1),
                              uint32_t(p0 >> 32) ^ c[3] ^ key[1], uint32_t(p0)};
    std::memcpy(c, next, sizeof c);
    key[0] += 0x9e3779b9u, key[1] += 0xbb67ae85u;
  }
  return -log64(-log64((double(c[0]) + 0.5) * 0x1p-32));
}

}  // namespace scalar

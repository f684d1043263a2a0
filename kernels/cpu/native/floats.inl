// The floating-point half of the contract (kernels/ops.py), once for every instruction set: plain
// loops over fixed widths that the compiler turns into vectors without changing a bit (no
// contraction, no reordering). Included inside an anonymous namespace by each isa_*.cpp.

constexpr float kTiny = 0x1p-100f;
constexpr float kMagic = 0x1.8p23f;  // x + kMagic - kMagic rounds to the nearest even, |x| < 2^22

inline float round_even(float x) { return (x + kMagic) - kMagic; }

inline uint32_t bits_of(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}

inline float float_of(uint32_t u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

// exp(x) for x <= 0: kernels/reference/numeric.py, exp_nonpositive
inline float exp_nonpositive(float x) {
  const float safe = x < -87.0f ? -87.0f : x;
  const float n = round_even(safe * 1.4426950408889634f);
  const float r = (safe - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const float y = ((p * (r * r)) + r) + 1.0f;
  const float power = float_of(uint32_t(int32_t(n) + 127) << 23);
  return x < -87.0f ? 0.0f : y * power;
}

// 16 numbers, in as many registers as the instruction set needs. Where the order of a reduction is
// given, the compiler makes it scalar unless it is written with these.
using Lanes [[gnu::vector_size(64), gnu::aligned(4), gnu::may_alias]] = float;
using Whole [[gnu::vector_size(64), gnu::aligned(4), gnu::may_alias]] = int32_t;

inline const Lanes& lanes(const float* x) { return *reinterpret_cast<const Lanes*>(x); }

// f over all 16, halves first: every instruction set gives the same bits
template <class F>
[[gnu::always_inline]] inline float fold(Lanes x, F f) {
  x = f(x, __builtin_shuffle(x, Whole{8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7}));
  x = f(x, __builtin_shuffle(x, Whole{4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11}));
  x = f(x, __builtin_shuffle(x, Whole{2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13}));
  x = f(x, __builtin_shuffle(x, Whole{1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14}));
  return x[0];
}

inline Lanes larger(Lanes a, Lanes b) { return a > b ? a : b; }

inline float max_lane(Lanes x) {
  return fold(x, [](Lanes a, Lanes b) { return larger(b, a); });
}

// of numbers >= 0: NaN wins, as its bits are the largest
inline Lanes larger_bits(Lanes a, Lanes b) { return (Whole)a > (Whole)b ? a : b; }

inline float peak_lane(Lanes x) {
  return fold(x, [](Lanes a, Lanes b) { return larger_bits(b, a); });
}

inline float sum_lane(Lanes x) {
  return fold(x, [](Lanes a, Lanes b) { return a + b; });
}

inline Lanes exp_nonpositive(Lanes x) {
  const Lanes cut = Lanes{} - 87.0f;
  const Lanes safe = x < cut ? cut : x;
  const Lanes n = (safe * 1.4426950408889634f + kMagic) - kMagic;
  const Lanes r = (safe - n * 0.693359375f) - n * -2.12194440e-4f;
  Lanes p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const Lanes y = ((p * (r * r)) + r) + 1.0f;
  const Lanes power = (Lanes)((__builtin_convertvector(n, Whole) + 127) << 23);
  return x < cut ? Lanes{} : y * power;
}

// |x| of the largest element; NaN and infinity win, as their bits are the largest
inline float peak_of(const float* x, int n) {
  uint32_t most = 0;
  for (int i = 0; i < n; i++) {
    const uint32_t u = bits_of(x[i]) & 0x7fffffffu;
    most = u > most ? u : most;
  }
  return float_of(most);
}

// squares in 32 lanes, ascending, then halves
inline float sum_of_squares(const float* x, int n) {
  Lanes first{}, second{};
  int i = 0;
  for (; i + 32 <= n; i += 32) {
    first = first + lanes(x + i) * lanes(x + i);
    second = second + lanes(x + i + 16) * lanes(x + i + 16);
  }
  float rest[32] = {};
  for (int l = 0; i + l < n; l++) rest[l] = x[i + l];
  first = first + lanes(rest) * lanes(rest);
  second = second + lanes(rest + 16) * lanes(rest + 16);
  return sum_lane(first + second);
}

inline float inverse_rms(const float* x, int n, float eps) {
  return 1.0f / std::sqrt(sum_of_squares(x, n) / float(n) + eps);
}

struct Quantiser {
  float inverse, scale;
};

// for factor * x; the scale is NaN if any of it is not finite
inline Quantiser quantiser_of(const float* x, int n, float factor) {
  uint32_t most = 0;
  for (int i = 0; i < n; i++) {
    const uint32_t u = bits_of(x[i] * factor) & 0x7fffffffu;
    most = u > most ? u : most;
  }
  const float peak = float_of(most);
  if (most >= 0x7f800000u) return {0.0f, float_of(0x7fc00000u)};
  if (peak < kTiny) return {0.0f, 0.0f};
  return {127.0f / peak, peak / 127.0f};
}

using Bytes [[gnu::vector_size(16), gnu::aligned(1), gnu::may_alias]] = int8_t;

// 16 codes of factor * x from element i on, zero from n on
inline Whole codes_at(const float* x, int i, int n, float factor, float inverse) {
  float rest[16] = {};
  if (i + 16 > n) {
    for (int l = 0; i + l < n; l++) rest[l] = x[i + l];
    x = rest, i = 0;
  }
  Lanes c = (((lanes(x + i) * factor) * inverse) + kMagic) - kMagic;
  c = c > 127.0f ? Lanes{} + 127.0f : c;
  c = c < -127.0f ? Lanes{} - 127.0f : c;
  c = c == c ? c : Lanes{};
  return __builtin_convertvector(c, Whole);
}

inline int32_t sum_lane(Whole x) {
  int32_t sum = 0;
  for (int l = 0; l < 16; l++) sum += x[l];
  return sum;
}

inline void quantise_row(const float* x, int n, float factor, int row, int G, const Activation& a) {
  const Quantiser q = quantiser_of(x, n, factor);
  a.scale[row] = q.scale;
  const int I = a.interleave;
  int8_t* out = a.codes + int64_t(row / I) * I * a.stride + row % I * 4;
  for (int g = 0; g < a.groups; g++) {
    Whole sum{};
    for (int i = g * G; i < (g + 1) * G; i += 16, out += 16 * I) {
      const Whole whole = codes_at(x, i, n, factor, q.inverse);
      const Bytes codes = __builtin_convertvector(whole, Bytes);
      sum = sum + whole;
      if (I == 1)
        *reinterpret_cast<Bytes*>(out) = codes;
      else
        for (int w = 0; w < 4; w++)
          std::memcpy(out + 4 * w * I, reinterpret_cast<const int8_t*>(&codes) + 4 * w, 4);
    }
    a.sums[int64_t(row) * a.groups + g] = sum_lane(sum);
  }
}

void quantise(const float* x, int n, int row, int G, const Activation& a) {
  quantise_row(x, n, 1.0f, row, G, a);
}

void norm_quantise(const float* x, int n, float eps, int row, int G, const Activation& a) {
  quantise_row(x, n, inverse_rms(x, n, eps), row, G, a);
}

void silu_mul(const float* gate, const float* up, int n, float* out) {
  auto product = [](Lanes g, Lanes u) {
    const Lanes e = exp_nonpositive((Lanes)((Whole)g | INT32_MIN));  // of -|g|
    const Lanes s = (g >= 0.0f ? Lanes{} + 1.0f : e) / (1.0f + e);
    return (g * s) * u;
  };
  int i = 0;
  for (; i + 16 <= n; i += 16)
    *reinterpret_cast<Lanes*>(out + i) = product(lanes(gate + i), lanes(up + i));
  if (i == n) return;
  float rest[2][16] = {};
  for (int l = 0; i + l < n; l++) rest[0][l] = gate[i + l], rest[1][l] = up[i + l];
  const Lanes last = product(lanes(rest[0]), lanes(rest[1]));
  for (int l = 0; i + l < n; l++) out[i + l] = last[l];
}

// fp16 and back, in integers

inline float half_to_float(uint16_t h) {
  // the exponent of fp16 in the place of fp32's, then 2^112: subnormals come out right as well
  const float scaled = float_of(uint32_t(h & 0x7fffu) << 13) * 0x1p112f;
  const uint32_t special = (h & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;
  return float_of(bits_of(scaled) | special | (uint32_t(h & 0x8000u) << 16));
}

// the smallest fp16 number >= x, for x >= 0; at most 65504
inline uint16_t half_up(float x) {
  if (!(x == x)) return 0x7e00u;
  if (x >= 65504.0f) return 0x7bffu;
  uint32_t h;
  if (x < 0x1p-14f) {
    const float scaled = x * 0x1p24f;  // exact: whole steps of the subnormals
    h = uint32_t(scaled);
    if (float(h) < scaled) h++;
  } else {
    const uint32_t u = bits_of(x) - (112u << 23);
    h = u >> 13;
    if (u & 0x1fffu) h++;
  }
  return uint16_t(h);
}

void argmax(const float* x, int n, float* best, int32_t* index, bool* finite) {
  Lanes most = Lanes{} + x[0];
  Whole peak{};
  int i = 0;
  for (; i + 16 <= n; i += 16) {
    const Whole magnitude = (Whole)lanes(x + i) & INT32_MAX;
    most = larger(lanes(x + i), most);
    peak = magnitude > peak ? magnitude : peak;
  }
  float top = max_lane(most);
  uint32_t largest = bits_of(peak_lane((Lanes)peak));
  for (; i < n; i++) {
    const uint32_t magnitude = bits_of(x[i]) & 0x7fffffffu;
    top = x[i] > top ? x[i] : top;
    largest = magnitude > largest ? magnitude : largest;
  }
  *finite = largest < 0x7f800000u;
  int at = 0;
  while (at < n - 1 && x[at] != top) at++;
  *index = at;
  *best = x[at];
}

uint64_t checksum(const uint8_t* data, int64_t bytes) {
  uint64_t lanes[16] = {};  // more would not stay in the registers of small instruction sets
  for (int64_t i = 0; i + 128 <= bytes; i += 128)
    for (int l = 0; l < 16; l++) {
      uint64_t word;
      std::memcpy(&word, data + i + 8 * l, 8);
      lanes[l] += word;
    }
  uint64_t sum = 0;
  for (uint64_t lane : lanes) sum += lane;
  return sum;
}

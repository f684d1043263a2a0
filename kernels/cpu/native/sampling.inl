// The fp64 half of sampling (kernels/sampling.py): fixed sequences in loops over blocks. Included
// inside an anonymous namespace by each isa_*.cpp.

constexpr double kLn2 = 0x1.62e42fefa39efp-1;

inline double round_even64(double x) { return (x + 0x1.8p52) - 0x1.8p52; }

// exp of x <= 0; 0 below -700
void exp64(const double* x, int n, double* out) {
  for (int i = 0; i < n; i++) {
    const double clipped = x[i] < -700.0 ? -700.0 : x[i];
    const double whole = round_even64(clipped / kLn2);
    const double r = clipped - whole * kLn2;
    double total = 1.0;
    for (int k = 14; k > 0; k--) total = total * r / double(k) + 1.0;
    const int64_t bits = (int64_t(whole) + 1023) << 52;
    double power;
    std::memcpy(&power, &bits, 8);
    out[i] = x[i] < -700.0 ? 0.0 : total * power;
  }
}

inline double log64(double x) {  // x > 0, normal
  int64_t bits;
  std::memcpy(&bits, &x, 8);
  const int64_t exponent = (bits >> 52) - 1022;
  const int64_t mantissa = (bits & 0xfffffffffffffLL) | (1022LL << 52);
  double m;
  std::memcpy(&m, &mantissa, 8);
  const bool small = m < 0.7071067811865476;
  m = small ? m * 2.0 : m;
  const double e = double(small ? exponent - 1 : exponent);
  const double s = (m - 1.0) / (m + 1.0), z = s * s;
  double total = 1.0 / 25.0;
  for (int k = 23; k > 0; k -= 2) total = total * z + 1.0 / double(k);
  return e * kLn2 + 2.0 * s * total;
}

// Gumbel noise of Philox4x32-10: key = seed, counter = (position low, high, id, 0)
void gumbel(uint64_t seed, uint64_t position, const int32_t* ids, int n, double* out) {
  constexpr uint64_t mask = 0xffffffffu;
  uint64_t c0[64], c1[64], c2[64], c3[64];
  for (int from = 0; from < n; from += 64) {
    const int count = n - from < 64 ? n - from : 64;
    for (int i = 0; i < 64; i++) {
      c0[i] = position & mask, c1[i] = position >> 32, c3[i] = 0;
      c2[i] = i < count ? uint32_t(ids[from + i]) : 0;
    }
    uint64_t k0 = seed & mask, k1 = seed >> 32;
    for (int round = 0; round < 10; round++) {
      for (int i = 0; i < 64; i++) {
        const uint64_t p0 = 0xd2511f53u * c0[i], p1 = 0xcd9e8d57u * c2[i];
        c0[i] = (p1 >> 32) ^ c1[i] ^ k0, c1[i] = p1 & mask;
        c2[i] = (p0 >> 32) ^ c3[i] ^ k1, c3[i] = p0 & mask;
      }
      k0 = (k0 + 0x9e3779b9u) & mask, k1 = (k1 + 0xbb67ae85u) & mask;
    }
    for (int i = 0; i < count; i++) {
      const double u = (double(int64_t(c0[i])) + 0.5) * 0x1p-32;
      out[from + i] = -log64(-log64(u));
    }
  }
}

// Plain C++ for any processor: the loops that the other files write with instructions.
#include <cmath>
#include <cstring>

#include "types.h"

namespace edge {
namespace {

constexpr int kTileRows = 4;

template <bool w8>
inline void group_dot(const uint8_t* base, const uint8_t* refine, int step, int G, const int8_t* a,
                      int32_t sum, int32_t* acc) {
  constexpr int offset = w8 ? 136 : 8;
  for (int n = 0; n < kRows; n++) acc[n] = -offset * sum;
  for (int c = 0; c < G / 8; c++, base += step, refine += step)
    for (int n = 0; n < kRows; n++)
      for (int i = 0; i < 4; i++) {
        const int b = base[4 * n + i], r = refine[4 * n + i];
        const int low = w8 ? ((b & 15) << 4) | (r & 15) : b & 15;
        const int high = w8 ? (b & 0xf0) | (r >> 4) : b >> 4;
        acc[n] += low * a[4 * c + i] + high * a[G / 2 + 4 * c + i];
      }
}

template <bool w8, int M>
struct Tile {
  static void run(const Linear& L, int tile, const int8_t* codes, int64_t stride, int,
                  const int32_t* sums, int groups, float (*out)[kRows]) {
    const int64_t bytes = int64_t(L.Kp) * (kTile / 2);
    const int G = L.G, count = L.Kp / G;
    const int16_t* mult = L.mult + int64_t(tile) * count * kTile;
    for (int i = 0; i < kHalves * M; i++) {
      const int half = i / M, m = i % M;
      int64_t total[kRows] = {};
      for (int g = 0; g < count; g++) {
        int32_t acc[kRows];
        const int64_t at = tile * bytes + int64_t(g) * G * (kTile / 2) + half * 64;
        group_dot<w8>(L.base + at, L.refine + at, kTile * 4, G, codes + m * stride + g * G,
                      sums[int64_t(m) * groups + g], acc);
        for (int n = 0; n < kRows; n++)
          total[n] += int64_t(acc[n]) * mult[g * kTile + half * kRows + n];
      }
      for (int n = 0; n < kRows; n++) out[i][n] = float(w8 ? total[n] : total[n] * 16);
    }
  }
};

inline void dots16(const uint8_t* base, const uint8_t* refine, int K, const int8_t* a, int stride,
                   const int32_t* sums, int rows, int32_t* out, int out_stride) {
  for (int r = 0; r < rows; r++) {
    if (refine)
      group_dot<true>(base, refine, 64, K, a + r * stride, sums[r], out + r * out_stride);
    else
      group_dot<false>(base, base, 64, K, a + r * stride, sums[r], out + r * out_stride);
  }
}

#include "linear.inl"

#include "floats.inl"

#include "sampling.inl"

#include "attention.inl"

}  // namespace

const Isa* isa_portable() { return table("portable", 1); }

}  // namespace edge

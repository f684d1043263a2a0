// Plain C++ for any processor: the loops that the other files write with instructions.
#include <cmath>
#include <cstring>

#include "types.h"

namespace edge {
namespace {

constexpr int kTileRows = 4;
constexpr int kOffset = 136;  // of both nibbles above a code; of one alone it is 8

constexpr int kLanes = 8;   // int16 in a register of 16 bytes, which every processor of today has
constexpr int kChunks = 8;  // as many as int16 can add up: 2 · 8 · 15 · 128 < 2^15

// sum[j] += nibbles of byte j times activations j mod 4, low and high half of the group
inline void add_chunk(const uint8_t* plane, const int16_t* low, const int16_t* high, int16_t* sum) {
  for (int v = 0; v < 4 * kRows; v += kLanes)
    for (int l = 0; l < kLanes; l++) {
      const int16_t x = plane[v + l];
      sum[v + l] = int16_t(sum[v + l] + (x & 15) * low[l] + (x >> 4) * high[l]);
    }
}

template <bool w8>
inline void group_dot(const uint8_t* base, const uint8_t* refine, int step, int G, const int8_t* a,
                      int32_t sum, int32_t* acc) {
  constexpr int offset = w8 ? kOffset : 8;
  for (int n = 0; n < kRows; n++) acc[n] = -offset * sum;
  for (int first = 0; first < G / 8; first += kChunks) {
    int16_t b[4 * kRows] = {}, r[4 * kRows] = {};
    const int end = first + kChunks < G / 8 ? first + kChunks : G / 8;
    for (int c = first; c < end; c++) {
      int16_t low[kLanes], high[kLanes];
      for (int l = 0; l < kLanes; l++) low[l] = a[4 * c + l % 4];
      for (int l = 0; l < kLanes; l++) high[l] = a[G / 2 + 4 * c + l % 4];
      add_chunk(base + step * c, low, high, b);
      if (w8) add_chunk(refine + step * c, low, high, r);
    }
    for (int n = 0; n < kRows; n++)
      for (int i = 4 * n; i < 4 * n + 4; i++) acc[n] += w8 ? 16 * b[i] + r[i] : b[i];
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

#include "floats.inl"

#include "linear.inl"

#include "sampling.inl"

#include "attention.inl"

}  // namespace

const Isa* isa_portable() { return table("portable", 1); }

}  // namespace edge

// AVX2 without VNNI: a chunk of a tile is two ymm registers, 8 rows by 4 inputs each.
//
// vpmaddubsw multiplies unsigned bytes with signed ones and adds pairs into int16, saturating; so
// the planes stay apart: with a nibble (0…15) and an activation of at least -128 a pair is within
// 15 · 128 · 2 = 3840, and eight of them (four chunks) are within 30720 and cannot saturate. Then
// vpmaddwd widens to int32: dot = 16 · base + refine. Source: Intel's intrinsics guide.
#include "types.h"

#ifdef __AVX2__
#include <immintrin.h>

#include <cmath>
#include <cstring>

namespace edge {
namespace {

constexpr int kTileRows = 4;  // activations that share one unpacking of weights, in 16 registers
constexpr int kDotRows = 4;  // the same for attention
constexpr int kOffset = 136;  // of both nibbles above a code; of one alone it is 8
constexpr int kChunks = 4;    // as many as int16 can add up
constexpr int kSums = 8;      // registers for int16 sums, of the 16

inline __m256i load(const void* from) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(from));
}

inline __m256i four(const int8_t* a) {
  int32_t word;
  std::memcpy(&word, a, 4);
  return _mm256_set1_epi32(word);
}

template <bool high>
inline __m256i nibbles(const uint8_t* plane) {
  const __m256i x = load(plane);
  return _mm256_and_si256(high ? _mm256_srli_epi16(x, 4) : x, _mm256_set1_epi8(0x0f));
}

// the empty statement keeps the compiler from adding products to each other first, for which it has
// no registers
inline void add_pairs(__m256i& sum, __m256i nibbles, __m256i x) {
  sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(nibbles, x));
  asm("" : "+x"(sum));
}

// b[i][m] and r[i][m] += the pairs of one chunk and half of the group
template <bool w8, bool high, int M, int P>
inline void add_half(const uint8_t* base, const uint8_t* refine, const int8_t* a, int64_t row,
                     __m256i (*b)[M], __m256i (*r)[M]) {
  for (int i = 0; i < P; i++) {
    const __m256i q4 = nibbles<high>(base + 32 * i);
    const __m256i qr = w8 ? nibbles<high>(refine + 32 * i) : q4;
    for (int m = 0; m < M; m++) {
      const __m256i x = four(a + m * row);
      add_pairs(b[i][m], q4, x);
      if (w8) add_pairs(r[i][m], qr, x);
    }
  }
}

// Where the activations of M rows are: input k of row m at a[m * row + k / 4 * step + k % 4].
struct Inputs {
  const int8_t* a;
  int64_t row, step;
};

// acc[part][m] += dots of at most kChunks chunks; a part is 8 of the rows of a tile. The loops stay
// loops: unrolled, the compiler loads every activation first and has no registers left.
template <bool w8, int M, int parts>
inline void add_chunks(const uint8_t* base, const uint8_t* refine, int chunks, const Inputs& x,
                       int64_t half, __m256i (*acc)[M]) {
  constexpr int fit = kSums / (w8 ? 2 * M : M);
  constexpr int P = fit >= parts ? parts : fit >= 2 ? 2 : 1;
  const __m256i one = _mm256_set1_epi16(1), sixteen = _mm256_set1_epi16(16);
#pragma GCC unroll 1
  for (int p = 0; p < parts; p += P) {
    __m256i b[P][M], r[P][M];
    for (int i = 0; i < P; i++)
      for (int m = 0; m < M; m++) b[i][m] = r[i][m] = _mm256_setzero_si256();
    const int8_t* a = x.a;
    int64_t at = p * 32;
#pragma GCC unroll 1
    for (int c = 0; c < chunks; c++, a += x.step, at += parts * 32) {
      add_half<w8, false, M, P>(base + at, refine + at, a, x.row, b, r);
      add_half<w8, true, M, P>(base + at, refine + at, a + half, x.row, b, r);
    }
    for (int i = 0; i < P; i++)
      for (int m = 0; m < M; m++) {
        __m256i dot = _mm256_madd_epi16(b[i][m], w8 ? sixteen : one);
        if (w8) dot = _mm256_add_epi32(dot, _mm256_madd_epi16(r[i][m], one));
        acc[p + i][m] = _mm256_add_epi32(acc[p + i][m], dot);
      }
  }
}

// acc[part][m] = dots of one group of G inputs
template <bool w8, int M, int parts>
inline void group_dots(const uint8_t* base, const uint8_t* refine, int G, Inputs x,
                       const int32_t* sums, int groups, __m256i (*acc)[M]) {
  constexpr int offset = w8 ? kOffset : 8;
  for (int m = 0; m < M; m++)
    for (int p = 0; p < parts; p++)
      acc[p][m] = _mm256_set1_epi32(-offset * sums[int64_t(m) * groups]);
  const int64_t half = G / 8 * x.step;
  for (int left = G / 8; left > 0; left -= kChunks) {
    add_chunks<w8, M, parts>(base, refine, left < kChunks ? left : kChunks, x, half, acc);
    base += kChunks * parts * 32, refine += kChunks * parts * 32, x.a += kChunks * x.step;
  }
}

// Four integers, exact below 2^51, which takes four million inputs to reach: they become the low
// bits of a number whose unit is 1.
inline __m256d exact_double(__m256i x) {
  const __m256d magic = _mm256_set1_pd(0x1.8p52);
  const __m256i shifted = _mm256_add_epi64(x, _mm256_castpd_si256(magic));
  return _mm256_sub_pd(_mm256_castsi256_pd(shifted), magic);
}

template <bool w8, int M>
struct Tile {
  static constexpr int kParts = kTile / 8;
  __m256i even[kParts][M], odd[kParts][M];  // 64-bit sums of even and of odd rows

  static void run(const Linear& L, int tile, const int8_t* codes, int64_t stride, int interleave,
                  const int32_t* sums, int groups, float (*out)[kRows]) {
    Tile total;
    for (int p = 0; p < kParts; p++)
      for (int m = 0; m < M; m++) total.even[p][m] = total.odd[p][m] = _mm256_setzero_si256();
    const int G = L.G, count = L.Kp / G;
    const int64_t group_bytes = int64_t(G) * (kTile / 2), at = tile * count * group_bytes;
    const uint8_t *base = L.base + at, *refine = L.refine + at;
    const int16_t* mult = L.mult + int64_t(tile) * count * kTile;
    Inputs x{codes, interleave > 1 ? 4 : stride, 4 * interleave};
    for (int g = 0; g < count; g++, x.a += int64_t(G) * interleave) {
      __m256i acc[kParts][M];
      group_dots<w8, M, kParts>(base, refine, G, x, sums + g, groups, acc);
      for (int p = 0; p < kParts; p++) total.add(p, acc[p], mult + 8 * p);
      base += group_bytes, refine += group_bytes, mult += kTile;
    }
    for (int p = 0; p < kParts; p++)
      for (int m = 0; m < M; m++) total.store(p, m, out[p / 2 * M + m] + p % 2 * 8);
  }

  void add(int p, const __m256i* acc, const int16_t* mult) {
    const __m128i narrow = _mm_loadu_si128(reinterpret_cast<const __m128i*>(mult));
    const __m256i s = _mm256_cvtepi16_epi32(narrow), s_odd = _mm256_srli_epi64(s, 32);
    for (int m = 0; m < M; m++) {
      const __m256i x_odd = _mm256_srli_epi64(acc[m], 32);
      even[p][m] = _mm256_add_epi64(even[p][m], _mm256_mul_epi32(acc[m], s));
      odd[p][m] = _mm256_add_epi64(odd[p][m], _mm256_mul_epi32(x_odd, s_odd));
    }
  }

  // rounded once, rows in order
  void store(int p, int m, float* out) const {
    const int shift = w8 ? 0 : 4;
    const __m128 e = _mm256_cvtpd_ps(exact_double(_mm256_slli_epi64(even[p][m], shift)));
    const __m128 o = _mm256_cvtpd_ps(exact_double(_mm256_slli_epi64(odd[p][m], shift)));
    _mm_storeu_ps(out, _mm_unpacklo_ps(e, o));
    _mm_storeu_ps(out + 4, _mm_unpackhi_ps(e, o));
  }
};

template <bool w8, int M>
void dots_rows(const uint8_t* base, const uint8_t* refine, int K, const int8_t* a, int stride,
               const int32_t* sums, int32_t* out, int out_stride) {
  constexpr int kParts = kRows / 8;
  __m256i acc[kParts][M];
  group_dots<w8, M, kParts>(base, refine, K, {a, stride, 4}, sums, 1, acc);
  for (int m = 0; m < M; m++)
    for (int p = 0; p < kParts; p++)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + m * out_stride + 8 * p), acc[p][m]);
}

#include "dots.inl"

#include "floats.inl"

#include "linear.inl"

#include "sampling.inl"

#include "attention.inl"

}  // namespace

const Isa* isa_avx2() { return table("avx2", kTileRows); }

}  // namespace edge

#else

namespace edge {
const Isa* isa_avx2() { return nullptr; }
}  // namespace edge

#endif

// Armv8.2 with dot products (Cortex-A76 and later): a chunk of a tile is four registers, 4 rows by
// 4 inputs each.
//
// sdot multiplies signed bytes and adds four products to each int32 lane, the four activations
// taken from one lane of a register. A byte of the w8 view is code + 8, of the w4 view q4 + 8: the
// 8 leaves through the sums of the activations. Source: Arm's intrinsics reference (ACLE).
#include "types.h"

#ifdef __ARM_FEATURE_DOTPROD
#include <arm_neon.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>

#include <cmath>
#include <cstring>

namespace edge {
namespace {

constexpr int kTileRows = 8;    // activations that share one unpacking of weights
constexpr int kDotRows = 4;  // the same for attention
constexpr int kOffset = 8;      // of a byte above its code, in both views
constexpr int kRegisters = 24;  // of the 32, for sums and activations

template <bool w8>
inline void codes_of(const uint8_t* base, const uint8_t* refine, int8x16_t& low, int8x16_t& high) {
  const uint8x16_t b = vld1q_u8(base);
  if constexpr (w8) {
    // from code + 136, unsigned, to code + 8, signed, in both nibbles
    const uint8x16_t q4 = veorq_u8(b, vdupq_n_u8(0x88)), r = vld1q_u8(refine);
    low = vreinterpretq_s8_u8(vsliq_n_u8(r, q4, 4));
    high = vreinterpretq_s8_u8(vsriq_n_u8(q4, r, 4));
  } else {
    low = vreinterpretq_s8_u8(vandq_u8(b, vdupq_n_u8(0x0f)));
    high = vreinterpretq_s8_u8(vshrq_n_u8(b, 4));
  }
}

// sum[q][m] += dots of one chunk, whose activations are a lane of x[m] and of y[m]
template <bool w8, int M, int Q, int lane>
inline void add_chunk(const uint8_t* base, const uint8_t* refine, const int8x16_t* x,
                      const int8x16_t* y, int32x4_t (*sum)[M]) {
  for (int q = 0; q < Q; q++) {
    int8x16_t low, high;
    codes_of<w8>(base + 16 * q, refine + 16 * q, low, high);
    for (int m = 0; m < M; m++) {
      sum[q][m] = vdotq_laneq_s32(sum[q][m], low, x[m], lane);
      sum[q][m] = vdotq_laneq_s32(sum[q][m], high, y[m], lane);
    }
  }
}

inline int8x16_t four(const int8_t* a) {
  int32_t word;
  std::memcpy(&word, a, 4);
  return vreinterpretq_s8_s32(vdupq_n_s32(word));
}

// sum[q][m] += dots of G inputs for Q registers of rows; `chunk` bytes of a plane hold those of all
// rows of a tile
template <bool w8, int M, int Q, int chunk>
inline void add_group(const uint8_t* base, const uint8_t* refine, int G, const int8_t* a,
                      int64_t stride, int32x4_t (*sum)[M]) {
  const int half = G / 2;
  int8x16_t x[M], y[M];
  int left = G / 8;
  for (; left >= 4; left -= 4, base += 4 * chunk, refine += 4 * chunk, a += 16) {
    for (int m = 0; m < M; m++) x[m] = vld1q_s8(a + m * stride);
    for (int m = 0; m < M; m++) y[m] = vld1q_s8(a + m * stride + half);
    add_chunk<w8, M, Q, 0>(base, refine, x, y, sum);
    add_chunk<w8, M, Q, 1>(base + chunk, refine + chunk, x, y, sum);
    add_chunk<w8, M, Q, 2>(base + 2 * chunk, refine + 2 * chunk, x, y, sum);
    add_chunk<w8, M, Q, 3>(base + 3 * chunk, refine + 3 * chunk, x, y, sum);
  }
  for (; left > 0; left--, base += chunk, refine += chunk, a += 4) {
    for (int m = 0; m < M; m++) x[m] = four(a + m * stride);
    for (int m = 0; m < M; m++) y[m] = four(a + m * stride + half);
    add_chunk<w8, M, Q, 0>(base, refine, x, y, sum);
  }
}

// acc[quad][m] = dots of one group of G inputs. As many rows at a time as have room for their sums
// beside the activations, two registers each; the planes of a group stay in the first cache.
template <bool w8, int M, int quads>
inline void group_dots(const uint8_t* base, const uint8_t* refine, int G, const int8_t* a,
                       int64_t stride, const int32_t* sums, int groups, int32x4_t (*acc)[M]) {
  constexpr int fit = (kRegisters - 2 * M) / M;
  constexpr int Q = fit >= quads ? quads : fit >= 4 ? 4 : fit >= 2 ? 2 : 1;
#pragma GCC unroll 1
  for (int first = 0; first < quads; first += Q) {
    int32x4_t sum[Q][M];  // registers: acc is memory that the codes might be, too
    for (int q = 0; q < Q; q++)
      for (int m = 0; m < M; m++) sum[q][m] = vdupq_n_s32(-kOffset * sums[int64_t(m) * groups]);
    add_group<w8, M, Q, 16 * quads>(base + 16 * first, refine + 16 * first, G, a, stride, sum);
    for (int q = 0; q < Q; q++)
      for (int m = 0; m < M; m++) acc[first + q][m] = sum[q][m];
  }
}

// by way of fp64, which holds every sum exactly (below 2^51, which takes four million inputs)
template <bool w8>
inline float32x2_t rounded(int64x2_t total) {
  return vcvt_f32_f64(vcvtq_f64_s64(w8 ? total : vshlq_n_s64(total, 4)));
}

template <bool w8, int M>
struct Tile {
  static constexpr int kQuads = kTile / 4;

  static void run(const Linear& L, int tile, const int8_t* codes, int64_t stride, int,
                  const int32_t* sums, int groups, float (*out)[kRows]) {
    int64x2_t total[kQuads][M][2];
    for (int q = 0; q < kQuads; q++)
      for (int m = 0; m < M; m++) total[q][m][0] = total[q][m][1] = vdupq_n_s64(0);
    const int G = L.G, count = L.Kp / G;
    const int64_t group_bytes = int64_t(G) * (kTile / 2), at = tile * count * group_bytes;
    const uint8_t *base = L.base + at, *refine = L.refine + at;
    const int16_t* mult = L.mult + int64_t(tile) * count * kTile;
    for (int g = 0; g < count; g++, base += group_bytes, refine += group_bytes, mult += kTile) {
      int32x4_t acc[kQuads][M];
      group_dots<w8, M, kQuads>(base, refine, G, codes + g * G, stride, sums + g, groups, acc);
      for (int q = 0; q < kQuads; q++) {
        const int32x4_t s = vmovl_s16(vld1_s16(mult + 4 * q));
        for (int m = 0; m < M; m++) {
          int64x2_t &low = total[q][m][0], &high = total[q][m][1];
          low = vmlal_s32(low, vget_low_s32(acc[q][m]), vget_low_s32(s));
          high = vmlal_high_s32(high, acc[q][m], s);
        }
      }
    }
    for (int q = 0; q < kQuads; q++)
      for (int m = 0; m < M; m++)
        for (int i = 0; i < 2; i++)
          vst1_f32(out[q / 4 * M + m] + q % 4 * 4 + 2 * i, rounded<w8>(total[q][m][i]));
  }
};

template <bool w8, int M>
void dots_rows(const uint8_t* base, const uint8_t* refine, int K, const int8_t* a, int stride,
               const int32_t* sums, int32_t* out, int out_stride) {
  constexpr int kQuads = kRows / 4;
  int32x4_t acc[kQuads][M];
  group_dots<w8, M, kQuads>(base, refine, K, a, stride, sums, 1, acc);
  for (int m = 0; m < M; m++)
    for (int q = 0; q < kQuads; q++) vst1q_s32(out + m * out_stride + 4 * q, acc[q][m]);
}

#include "dots.inl"

#include "floats.inl"

#include "linear.inl"

#include "sampling.inl"

#include "attention.inl"

}  // namespace

const Isa* isa_dotprod() { return table("dotprod", 1); }

bool dotprod_available() { return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0; }

}  // namespace edge

#else

namespace edge {
const Isa* isa_dotprod() { return nullptr; }
bool dotprod_available() { return false; }
}  // namespace edge

#endif

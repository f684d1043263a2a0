// The definitions of kernels/ops.py once more, one element at a time: what the kernels must equal.
#pragma once
#include <cstdint>
#include <vector>

namespace scalar {

using Floats = std::vector<float>;

float exp_nonpositive(float x);
float round_even(float x);
float lane_sum(const Floats& x);  // 32 strided lanes ascending, then a halving tree

struct Quantised {
  std::vector<int> codes;
  float scale;
  bool finite;  // otherwise the codes mean nothing
};
Quantised quantise(const Floats& x);
Floats rms_norm(const Floats& x, float eps);
Floats silu_mul(const Floats& gate, const Floats& up);

float half_value(uint16_t half);
struct Nested {
  std::vector<int> q4, qr;
  uint16_t scale;
};
Nested nest(const Floats& x);

// head norm (null: none), RoPE, and R3 where scale is not 0
Floats rotate(Floats x, const float* norm, float eps, const float* cos, const float* sin,
              float scale);

// A block of 64 tokens as one query vector sees it.
struct Block {
  std::vector<std::vector<int>> k, v;  // [token][dim], 16 q4 + q_r or 16 q4
  Floats ks, vs;                       // fp16 values
  int visible;
};
struct Partial {
  float most, sum;
  Floats out;
};
Partial attend(const Floats& q, const Block& block, float softmax_scale);
Floats combine(const std::vector<Partial>& blocks);

// A nibble of planes [tiles][Kp/8][rows of a tile][4 bytes]: where input k of a row is.
struct Place {
  int64_t byte;
  int shift;
};
Place place(int tile_rows, int Kp, int G, int row, int k);

// The fp64 half of sampling (kernels/sampling.py).
double exp64(double x);
double gumbel(uint64_t seed, uint64_t position, uint32_t id);

}  // namespace scalar

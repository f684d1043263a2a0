// The nested linear for one instruction set, over `Tile<w8, M>` which the including file defines:
//
//   Tile<w8, M>::run(L, tile, codes, stride, interleave, sums, groups, acc)
//
// acc[h * M + m][n] = sum_g mult[n][g] * (sum_k code[n][k] * codes[m][k]) for row n of half h of a
// tile: an exact integer, times 16 in w4, rounded once to fp32. What is left, (acc * x_scale) * S +
// bias + residual, is here. kTileRows: the most rows of activations (M) at a time.

inline void finish_half(const Linear& L, int first, const float* acc, float x_scale, float* y,
                        const float* residual) {
  Lanes value = lanes(acc) * x_scale;
  value = value * lanes(L.scale + first);
  if (L.bias) value = value + lanes(L.bias + first);
  const int width = L.N - first;
  if (width >= kRows) {
    if (residual) value = lanes(residual + first) + value;
    *reinterpret_cast<Lanes*>(y + first) = value;
    return;
  }
  for (int n = 0; n < width; n++)
    y[first + n] = residual ? residual[first + n] + value[n] : value[n];
}

template <bool w8, int M>
void linear_rows(const Linear& L, const Activation& a, int row0, int tile, float* y,
                 int64_t y_stride, const float* residual) {
  alignas(64) float acc[kHalves * M][kRows];
  Tile<w8, M>::run(L, tile, a.codes + int64_t(row0) * a.stride, a.stride, a.interleave,
                   a.sums + int64_t(row0) * a.groups, a.groups, acc);
  for (int m = 0; m < M; m++) {
    const int64_t at = (row0 + m) * y_stride;
    for (int h = 0; h < kHalves; h++)
      finish_half(L, tile * kTile + h * kRows, acc[h * M + m], a.scale[row0 + m], y + at,
                  residual ? residual + at : nullptr);
  }
}

// As many rows at a time as M, then what is left in one go.
template <bool w8, int M>
void linear_tile(const Linear& L, const Activation& a, int row, int rows, int tile, float* y,
                 int64_t y_stride, const float* residual) {
  for (; rows - row >= M; row += M) linear_rows<w8, M>(L, a, row, tile, y, y_stride, residual);
  if constexpr (M > 1)
    if (row < rows) linear_tile<w8, M - 1>(L, a, row, rows, tile, y, y_stride, residual);
}

// The scales of a tile lie apart from its planes: a miss that the processor does not foresee. Always
// inline: gcc drops calls of a function that does nothing but fetch.
[[gnu::always_inline]] inline void fetch_scales(const Linear& L, int tile) {
  for (int h = 0; h < kHalves; h++) {
    __builtin_prefetch(L.scale + tile * kTile + h * kRows);
    if (L.bias) __builtin_prefetch(L.bias + tile * kTile + h * kRows);
  }
}

void linear(const Linear& L, bool w8, const Activation& a, int rows, int tile0, int tile1, float* y,
            int64_t y_stride, const float* residual) {
  // all rows over one tile before the next: its weights stay in the first cache
  for (int tile = tile0; tile < tile1; tile++) {
    fetch_scales(L, tile + 1);
    if (w8)
      linear_tile<true, kTileRows>(L, a, 0, rows, tile, y, y_stride, residual);
    else
      linear_tile<false, kTileRows>(L, a, 0, rows, tile, y, y_stride, residual);
  }
}

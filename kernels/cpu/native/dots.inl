// dots16 (attention.inl) for one instruction set, over dots_rows<w8, M> of the including file: as many
// rows at a time as kDotRows allows, then what is left in one go.

template <bool w8, int M>
void dots_view(const uint8_t* base, const uint8_t* refine, int K, const int8_t* a, int stride,
               const int32_t* sums, int rows, int32_t* out, int out_stride) {
  for (; rows >= M; rows -= M, a += M * stride, sums += M, out += M * out_stride)
    dots_rows<w8, M>(base, refine, K, a, stride, sums, out, out_stride);
  if constexpr (M > 1)
    if (rows) dots_view<w8, M - 1>(base, refine, K, a, stride, sums, rows, out, out_stride);
}

inline void dots16(const uint8_t* base, const uint8_t* refine, int K, const int8_t* a, int stride,
                   const int32_t* sums, int rows, int32_t* out, int out_stride) {
  if (refine)
    dots_view<true, kDotRows>(base, refine, K, a, stride, sums, rows, out, out_stride);
  else
    dots_view<false, kDotRows>(base, base, K, a, stride, sums, rows, out, out_stride);
}

// Packing of key rows as right operands of products: copied once, read by every tile of queries that sees them.
#pragma once

#include "vectors.h"

namespace dilated_attention {

// Transposes a matrix [rows, width] to [width, rows].
inline void transpose(const float* from, int64_t ld_from, float* to, int64_t ld_to, int64_t rows, int64_t width) {
  for (int64_t row = 0; row < rows; row += kLanes)
    for (int64_t column = 0; column < width; column += kLanes)
      at::vec::transpose_mxn<float>(
          from + row * ld_from + column, ld_from, to + column * ld_to + row, ld_to,
          static_cast<int>(std::min(kLanes, rows - row)), static_cast<int>(std::min(kLanes, width - column)));
}

#if defined(__AVX512BF16__)
inline void transpose(const BFloat16* from, int64_t ld_from, BFloat16* to, int64_t ld_to, int64_t rows, int64_t width) {
  constexpr int64_t step = 32;
  for (int64_t row = 0; row < rows; row += step)
    for (int64_t column = 0; column < width; column += step)
      at::vec::transpose_mxn<BFloat16>(
          from + row * ld_from + column, ld_from, to + column * ld_to + row, ld_to,
          static_cast<int>(std::min(step, rows - row)), static_cast<int>(std::min(step, width - column)));
}
#endif

// Packs rows [count, width] transposed, as the right operand of a product with [any, width]; for bfloat16 in pairs of
// columns, so that `width` must be even.
template <class C>
void pack_transposed(const C* rows, int64_t ld_rows, C* packed, int64_t ld, int64_t count, int64_t width) {
  constexpr int64_t pair = kPair<C>;
  transpose(
      reinterpret_cast<const float*>(rows), ld_rows / pair, reinterpret_cast<float*>(packed), ld, count, width / pair);
}

// Interleaves the numbers of two rows.
inline void interleave(const BFloat16* first, const BFloat16* second, BFloat16* to, int64_t width) {
  int64_t column = 0;
#if defined(__AVX512BF16__)
  constexpr int64_t step = 32;
  // 16-bit numbers are moved within quarters of a vector, then the quarters.
  const __m512i lows = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), highs = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
  for (; column + step <= width; column += step) {
    const __m512i a = _mm512_loadu_si512(first + column), b = _mm512_loadu_si512(second + column);
    const __m512i low = _mm512_unpacklo_epi16(a, b), high = _mm512_unpackhi_epi16(a, b);
    _mm512_storeu_si512(to + 2 * column, _mm512_permutex2var_epi64(low, lows, high));
    _mm512_storeu_si512(to + 2 * column + step, _mm512_permutex2var_epi64(low, highs, high));
  }
#endif
  for (; column < width; column++) {
    to[2 * column] = first[column];
    to[2 * column + 1] = second[column];
  }
}

// Packs rows [count, width] as the right operand of a product with [any, count]: unchanged, or for bfloat16 in pairs of
// rows, so that `count` must be even.
template <class C>
void pack_rows(const C* rows, int64_t ld_rows, C* packed, int64_t count, int64_t width) {
  if constexpr (kPair<C> == 1) {
    for (int64_t row = 0; row < count; row++) convert(rows + row * ld_rows, packed + row * width, width);
  } else {
    for (int64_t row = 0; row < count; row += 2)
      interleave(rows + row * ld_rows, rows + (row + 1) * ld_rows, packed + row * width, width);
  }
}

}  // namespace dilated_attention

// Vectors of float32 of the processor's width, and the operations of softmax on them.
#pragma once

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/native/CPUBlas.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <tuple>
#include <type_traits>

namespace dilated_attention {

using at::BFloat16;
using at::Half;
using Floats = at::vec::Vectorized<float>;

constexpr int64_t kLanes = Floats::size();
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Type of the factors of products: bfloat16 where the processor multiplies it, float32 otherwise.
#if defined(__AVX512BF16__)
template <class T>
using Factor = std::conditional_t<std::is_same_v<T, BFloat16>, BFloat16, float>;
#else
template <class T>
using Factor = float;
#endif

// Rows of bfloat16 are interleaved in pairs in the right operand of a product.
template <class C>
constexpr int64_t kPair = std::is_same_v<C, BFloat16> ? 2 : 1;

// Uninitialised memory, so that it is touched first by the threads that write to it.
template <class T>
class Buffer {
 public:
  T* at_least(int64_t size) {
    if (size > size_) data_.reset(new T[size_ = size]);
    return data_.get();
  }

 private:
  std::unique_ptr<T[]> data_;
  int64_t size_ = 0;
};

inline int64_t rounded_up(int64_t number, int64_t step) { return (number + step - 1) / step * step; }

// 2**x with a relative error of at most 1e-7 (2.3e-7 with `is_coarse`); 0 on underflow, NaN for NaN.
template <bool is_coarse>
inline Floats exp2(Floats x) {
#if defined(CPU_CAPABILITY_AVX512)
  constexpr float unit = 1.0f;
#else
  // The exponent has no room for subnormal numbers: powers are scaled by 2**32 until the last product.
  constexpr float unit = 0x1p32f;
#endif
  const auto polynomial = [](Floats part) {
    Floats p((is_coarse ? 0.001327644451521337f : 0.0001534579205326736f) * unit);
    constexpr float coarse[] = {0.009675538167357445f, 0.05550713464617729f, 0.24022120237350464f, 0.6931469440460205f, 1.0000001192092896f};
    constexpr float fine[] = {0.0013399929739534855f, 0.009618489071726799f, 0.05550328642129898f, 0.24022646248340607f, 0.6931471824645996f, 1.0f};
    if constexpr (is_coarse) {
      for (float c : coarse) p = at::vec::fmadd(p, part, Floats(c * unit));
    } else {
      for (float c : fine) p = at::vec::fmadd(p, part, Floats(c * unit));
    }
    return p;
  };
#if defined(CPU_CAPABILITY_AVX512)
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return _mm512_scalef_ps(polynomial(Floats(_mm512_sub_ps(x, whole))), whole);
#else
  const Floats smallest(-150.0f), safe = at::vec::maximum(x, smallest), whole = safe.round();
  const Floats power = polynomial(safe - whole);
  const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(whole), 23);
  const Floats scaled(_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(power), exponent)));
  // Zeros are set before the product, which some processors compute slowly if it underflows.
  return Floats::blendv(scaled, Floats(0.0f), x < smallest) * Floats(1.0f / unit);
#endif
}

// tanh(x) with a relative error of at most 3e-7, odd and at most 1; NaN for NaN. Inlined: it is part of innermost loops.
C10_ALWAYS_INLINE Floats tanh(Floats x) {
  constexpr float numerator[] = {2.102733560e-5f, 3.520756727e-3f, 1.340216100e-1f, 1.0f};
  constexpr float denominator[] = {3.326951409e-4f, 2.597254514e-2f, 4.673548340e-1f, 1.0f};
  const Floats most(7.9988117f), part = at::vec::clamp(x, Floats(0.0f) - most, most), square = part * part;
  Floats p(1.394553628e-8f), q(8.015776984e-7f);
  for (int i = 0; i < 4; i++) {
    p = at::vec::fmadd(p, square, Floats(numerator[i]));
    q = at::vec::fmadd(q, square, Floats(denominator[i]));
  }
  return part * p / q;
}

// The length of the vectors (x, y); 0 where it is NaN.
inline Floats length_of(Floats x, Floats y) {
  const Floats square = at::vec::fmadd(x, x, y * y);
  // The maximum of NaN and another number is the second operand.
#if defined(CPU_CAPABILITY_AVX512)
  return Floats(_mm512_max_ps(square, Floats(0.0f))).sqrt();
#else
  return Floats(_mm256_max_ps(square, Floats(0.0f))).sqrt();
#endif
}

inline float largest(Floats x) {
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_reduce_max_ps(x);
#else
  return at::vec::vec_reduce_all<float>([](Floats& a, Floats& b) { return at::vec::maximum(a, b); }, x);
#endif
}

inline float sum_of(Floats x) {
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_reduce_add_ps(x);
#else
  return at::vec::vec_reduce_all<float>([](Floats& a, Floats& b) { return a + b; }, x);
#endif
}

inline void store_pair(float* at, Floats low, Floats high) {
  low.store(at);
  high.store(at + kLanes);
}

inline void store_pair(BFloat16* at, Floats low, Floats high) {
#if defined(__AVX512BF16__)
  _mm512_storeu_si512(at, (__m512i)_mm512_cvtne2ps_pbh(high, low));
#else
  at::vec::convert_from_float<BFloat16>(low, high).store(at);
#endif
}

inline void store_one(float* at, Floats x) { x.store(at); }

inline void store_one(BFloat16* at, Floats x) { at::vec::convert_from_float<BFloat16>(x, x).store(at, kLanes); }

#if defined(__AVX512BF16__)
// Stores one vector into each of two rows, `ld` apart.
inline void store_rows(BFloat16* at, int64_t ld, Floats first, Floats second) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), (__m256i)_mm512_cvtneps_pbh(first));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(at + ld), (__m256i)_mm512_cvtneps_pbh(second));
}

// Stores two vectors with their numbers interleaved.
inline void store_interleaved(BFloat16* at, Floats first, Floats second) {
  const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(first));
  const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(second));
  _mm512_storeu_si512(at, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
}
#endif

// `sum` plus the products of a vector's numbers with those at `right`, added up in any order.
inline Floats add_products(Floats left, const float* right, Floats sum) {
  return at::vec::fmadd(left, Floats::loadu(right), sum);
}

template <class T>
inline Floats add_products(at::vec::Vectorized<T> left, const float* right, Floats sum) {
  const auto [low, high] = at::vec::convert_to_float<T>(left);
  return add_products(high, right + kLanes, add_products(low, right, sum));
}

#if defined(__AVX512BF16__)
inline Floats add_products(at::vec::Vectorized<BFloat16> left, const BFloat16* right, Floats sum) {
  return _mm512_dpbf16_ps(sum, (__m512bh)(__m512i)left, (__m512bh)_mm512_loadu_si512(right));
}
#endif

// Adds vectors, each times its weight, to the numbers at `sum`.
template <int count>
inline void add_weighted(const Floats (&weights)[count], const Floats (&vectors)[count], float* sum) {
  Floats total = Floats::loadu(sum);
  for (int i = 0; i < count; i++) total = at::vec::fmadd(weights[i], vectors[i], total);
  total.store(sum);
}

template <int count, class T>
inline void add_weighted(const Floats (&weights)[count], const at::vec::Vectorized<T> (&vectors)[count], float* sum) {
  Floats lows[count], highs[count];
  for (int i = 0; i < count; i++) std::tie(lows[i], highs[i]) = at::vec::convert_to_float<T>(vectors[i]);
  add_weighted(weights, lows, sum);
  add_weighted(weights, highs, sum + kLanes);
}

// The sum of each vector.
template <int count>
inline void store_sums(const Floats (&x)[count], float* at) {
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (count == 4) {
    const __m512 low = _mm512_add_ps(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1]));
    const __m512 high = _mm512_add_ps(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3]));
    const __m512 all = _mm512_add_ps(_mm512_shuffle_ps(low, high, 0x44), _mm512_shuffle_ps(low, high, 0xEE));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    _mm_storeu_ps(at, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
    return;
  }
#endif
  for (int i = 0; i < count; i++) at[i] = sum_of(x[i]);
}

template <class T>
inline float dot(const T* left, const T* right, int64_t count) {
  using Numbers = at::vec::Vectorized<T>;
  Floats sum(0.0f);
  const auto add = [&](Numbers a, Numbers b) {
    if constexpr (std::is_same_v<T, float>) {
      sum = at::vec::fmadd(a, b, sum);
    } else {
      const auto [low_a, high_a] = at::vec::convert_to_float<T>(a);
      const auto [low_b, high_b] = at::vec::convert_to_float<T>(b);
      sum = at::vec::fmadd(high_a, high_b, at::vec::fmadd(low_a, low_b, sum));
    }
  };
  int64_t at = 0;
  for (; at + Numbers::size() <= count; at += Numbers::size()) add(Numbers::loadu(left + at), Numbers::loadu(right + at));
  if (at < count) add(Numbers::loadu(left + at, count - at), Numbers::loadu(right + at, count - at));
  return sum_of(sum);
}

// Converts `count` numbers from one type to another.
template <class From, class To>
inline void convert(const From* from, To* to, int64_t count) {
  if constexpr (std::is_same_v<From, To>) {
    // Rows are short, and a call of the library's copy takes longer.
    using Numbers = at::vec::Vectorized<To>;
    int64_t at = 0;
    for (; at + Numbers::size() <= count; at += Numbers::size()) Numbers::loadu(from + at).store(to + at);
    for (; at < count; at++) to[at] = from[at];
  } else if constexpr (std::is_same_v<To, float>) {
    using Lows = at::vec::Vectorized<From>;
    int64_t at = 0;
    for (; at + Lows::size() <= count; at += Lows::size()) {
      const auto [low, high] = at::vec::convert_to_float<From>(Lows::loadu(from + at));
      low.store(to + at);
      high.store(to + at + kLanes);
    }
    for (; at < count; at++) to[at] = static_cast<float>(from[at]);
  } else {
    using Lows = at::vec::Vectorized<To>;
    int64_t at = 0;
    for (; at + Lows::size() <= count; at += Lows::size())
      at::vec::convert_from_float<To>(Floats::loadu(from + at), Floats::loadu(from + at + kLanes)).store(to + at);
    for (; at < count; at++) to[at] = static_cast<To>(from[at]);
  }
}

// c = a b, or c + a b, with a [m, k] and b [k, n]; a bfloat16 b is stored in pairs of rows.
template <class C>
inline void multiply(
    int64_t m, int64_t n, int64_t k, const C* a, int64_t ld_a, const C* b, int64_t ld_b, float* c, int64_t ld_c, bool is_added) {
  at::native::cpublas::brgemm(m, n, k, ld_a, ld_b, ld_c, is_added, a, b, c, kPair<C> == 2);
}

}  // namespace dilated_attention

// Terms of the scores besides the products of queries and keys.
#pragma once

#include <xmmintrin.h>

#include "partial.h"

namespace dilated_attention {

// s = cap(scale q.k) + line[h, origin + j - i] + key_bias[j] for the query with index i and the key with index j of a
// domain, with cap(x) = softcap tanh(x / softcap). Indices are positions of a problem, or its rows where it lists rows.
// With coordinates, the line has one number per head, and its product with the Euclidean distance of both rows is added.
struct Terms {
  float scale;
  float softcap, scale_in_caps;  // scale / softcap; both 0: none
  const float* line;             // [query heads, length]; null: none
  int64_t length, origin;
  std::optional<Rows<const float>> key_bias;  // [B, rows of keys, key/value heads]
  const float* coordinates = nullptr;         // [B, 2, rows] of the rows of keys; NaN: no bias; null: none
  int64_t num_rows = 0, first_query = 0;      // row of the coordinates of query row 0

  // Without terms, the scale is a factor of the exponents alone.
  bool are_present() const { return softcap != 0.0f || line != nullptr || key_bias; }
  // Factor from the scores to base-2 exponents.
  float factor() const { return are_present() ? kLog2E : scale * kLog2E; }

  // cap(scale x) and the derivative cap' there.
  C10_ALWAYS_INLINE std::pair<Floats, Floats> cap(Floats x) const {
    if (softcap == 0.0f) return {x * Floats(scale), Floats(1.0f)};
    const Floats part = tanh(x * Floats(scale_in_caps));
    return {part * Floats(softcap), at::vec::fnmadd(part, part, Floats(1.0f))};
  }

  // Replaces products by cap(scale x), plus the numbers at `added` unless it is null. `count` is a multiple of the lanes.
  void apply(float* products, int64_t count, const float* added = nullptr) const {
    const Terms own = *this;  // in registers: no product is one of its numbers
    for (int64_t x = 0; x < count; x += kLanes) {
      Floats score = own.cap(Floats::loadu(products + x)).first;
      if (added != nullptr) score = score + Floats::loadu(added + x);
      score.store(products + x);
    }
  }

  float of_key(const Domain& domain, int64_t row) const { return key_bias ? *key_bias->at(domain.batch, row, domain.head) : 0.0f; }

  float of_distance(int64_t head, int64_t distance) const {
    const int64_t index = origin + distance;
    return line == nullptr || index < 0 || index >= length ? 0.0f : line[head * length + index];
  }

  // x of a row; y is `num_rows` later.
  const float* of_key_row(const Domain& domain, int64_t row) const { return coordinates + 2 * domain.batch * num_rows + row; }
  const float* of_query_row(const Domain& domain, int64_t row) const { return of_key_row(domain, first_query + row); }

  // The bias by distance of `count` keys, a multiple of the lanes, with coordinates x and y for the query at `query`.
  void of_coordinates(int64_t head, const float* query, const float* x, const float* y, int64_t count, float* to) const {
    const Floats unit(line[head]), query_x(query[0]), query_y(query[num_rows]);
    for (int64_t i = 0; i < count; i += kLanes)
      (unit * length_of(query_x - Floats::loadu(x + i), query_y - Floats::loadu(y + i))).store(to + i);
  }

  // The numbers of `count` distances from `first` on: in place, or with zeros beyond the ends of the line in `copy`.
  const float* of_distances(int64_t head, int64_t first, int64_t count, float* copy) const {
    if (line == nullptr) return nullptr;
    const int64_t index = origin + first;
    if (index >= 0 && index + count <= length) return line + head * length + index;
    for (int64_t x = 0; x < count; x++) copy[x] = of_distance(head, first + x);
    return copy;
  }
};

// While it exists, numbers below the smallest normal one are 0 on this thread: under a bias by distance most of the
// probabilities of far keys are, and a product with one takes a hundred cycles.
class WithoutSubnormals {
 public:
  explicit WithoutSubnormals(const Terms& terms) : before_(_mm_getcsr()) {
    if (terms.line != nullptr) _mm_setcsr(before_ | kFlushToZero | kSubnormalsAreZero);
  }
  ~WithoutSubnormals() { _mm_setcsr(before_); }
  WithoutSubnormals(const WithoutSubnormals&) = delete;
  WithoutSubnormals& operator=(const WithoutSubnormals&) = delete;

 private:
  static constexpr unsigned int kFlushToZero = 0x8000, kSubnormalsAreZero = 0x0040;
  const unsigned int before_;
};

}  // namespace dilated_attention

// Running results of the queries, into which the results of partials are merged.
#pragma once

#include "kernels.h"

namespace dilated_attention {

template <class T>
class Results {
 public:
  Results(const ForwardOperands& x, const Partial& partial, const Masks& masks)
      : out_(x.out, x.of_out.row, x.of_out.head * partial.ratio),
        rounded_out_(x.out, x.of_out.row, x.of_out.head * partial.ratio), lse_(x.lse),
        is_rounded_(x.out.scalar_type() != at::kFloat), width_(partial.value_dim), keep_factor_(masks.keep_factor) {}

  // `sums` and `total` are of the powers of scores relative to `top`; `sums` is overwritten.
  void merge(int64_t batch, int64_t row, int64_t head, float* sums, float top, float total) const {
    float* lse = lse_.at(batch, row, head);
    const float own = top + logf(total);
    if (*lse == -kInfinity) {
      const float factor = keep_factor_ / total;
      for (int64_t c = 0; c < width_; c++) sums[c] *= factor;
      *lse = own;
    } else {
      const float weight = 1.0f / (1.0f + expf(*lse - own)), rest = 1.0f - weight, factor = weight * keep_factor_ / total;
      for (int64_t c = 0; c < width_; c++) sums[c] = earlier(batch, row, head, c) * rest + sums[c] * factor;
      *lse = std::max(*lse, own) + log1pf(expf(-std::abs(*lse - own)));
    }
    if (is_rounded_)
      convert(sums, rounded_out_.at(batch, row, head), width_);
    else
      std::copy_n(sums, width_, out_.at(batch, row, head));
  }

 private:
  float earlier(int64_t batch, int64_t row, int64_t head, int64_t c) const {
    return is_rounded_ ? static_cast<float>(rounded_out_.at(batch, row, head)[c]) : out_.at(batch, row, head)[c];
  }

  const Rows<float> out_;
  const Rows<T> rounded_out_;
  const Rows<float> lse_;
  const bool is_rounded_;
  const int64_t width_;
  const float keep_factor_;
};

}  // namespace dilated_attention

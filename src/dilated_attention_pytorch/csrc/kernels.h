// The kernels: a partial carried out, forward and backward.
#pragma once

#include <optional>

#include "partial.h"

namespace dilated_attention {

// Keys that the forward pass has packed at a time: what a query sees of more is merged window by window.
constexpr int64_t kKeysOfWindow = 8192;
// Queries of a domain that are so few that nothing is packed for them.
constexpr int64_t kRowsOfStream = 16;

// The first row and the first key/value head that a tensor begins with.
struct Origin {
  int64_t row, head;
};

// `out` begins at `of_out`, keys and values at `of_keys`; the others begin with the whole. `lse` is -inf where nothing was merged yet. `out` may be
// of the queries' dtype if every row is merged into once; else it is float32.
struct ForwardOperands {
  const at::Tensor &query, &key, &value, &out, &lse;
  double scale;
  Origin of_out, of_keys;
};

// Gradients, float32, are added to.
struct BackwardOperands {
  const at::Tensor &grad_out, &query, &key, &value, &out, &lse;
  const std::optional<at::Tensor>& grad_lse;
  const at::Tensor &grad_query, &grad_key, &grad_value;
  double scale;
  Origin of_grad_query, of_grad_keys, of_keys;
};

void forward(const Partial& partial, const Masks& masks, const ForwardOperands& operands);
void stream(const Partial& partial, const Masks& masks, const ForwardOperands& operands);
void backward(const Partial& partial, const Masks& masks, const BackwardOperands& operands);

}  // namespace dilated_attention

// The kernels for one partial, forward and backward.
#pragma once

#include <optional>

#include "partial.h"
#include "terms.h"

namespace dilated_attention {

// Number of keys that the forward pass packs at a time; queries that see more are merged window by window.
constexpr int64_t kKeysOfWindow = 8192;
// Keys of a block of packed keys, and the bytes of the packed keys and values of all domains together.
constexpr int64_t kPackedKeys = 256;
constexpr int64_t kPackedBytes = int64_t{1} << 24;
// The first key and the number of keys of a product are multiples of this, and in the backward pass its rows too.
constexpr int64_t kAlignment = 16;
// Query rows that the backward pass packs at a time, per thread. If keys are split into shares, all threads share the
// packed rows, and there are enough of them for four times as many rows of gradients per thread.
constexpr int64_t kRowsOfChunk = 4096;
// Largest number of query rows of a domain for which nothing is packed.
constexpr int64_t kRowsOfStream = 16;

// First row and first key/value head of a tensor.
struct Origin {
  int64_t row, head;
};

// `out` begins at `of_out`, keys and values at `of_keys`, the others at the beginning of the whole. `lse` is -inf where
// nothing was merged yet. `out` may have the queries' dtype if every row is merged into once; otherwise it is float32.
struct ForwardOperands {
  const at::Tensor &query, &key, &value, &out, &lse;
  const Terms& terms;
  Origin of_out, of_keys;
};

// Gradients are float32 and are added to; those of the line and of the keys' bias are optional.
struct BackwardOperands {
  const at::Tensor &grad_out, &query, &key, &value, &out, &lse;
  const std::optional<at::Tensor>& grad_lse;
  const at::Tensor &grad_query, &grad_key, &grad_value;
  const std::optional<at::Tensor>&grad_line, &grad_key_bias;
  const Terms& terms;
  Origin of_grad_query, of_grad_keys, of_keys;
};

void forward(const Partial& partial, const Masks& masks, const ForwardOperands& operands);
void stream(const Partial& partial, const Masks& masks, const ForwardOperands& operands);
void backward(const Partial& partial, const Masks& masks, const BackwardOperands& operands);

}  // namespace dilated_attention

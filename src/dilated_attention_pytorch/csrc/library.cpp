#include <torch/library.h>

#include "kernels.h"

namespace dilated_attention {
namespace {

using at::IntArrayRef;
using at::Tensor;

// `domains` [domains, 4]: batch, key/value head, first query row, first key row. `geometry`: queries and keys of a
// domain, step, the bounds of the band, keys of a unit. With lists, `rows` and `units` are those of all problems one
// after the other, and `row_ends` and `unit_ends` tell where each ends.
Partial partial_of(
    const Tensor& query, const Tensor& key, const Tensor& domains, IntArrayRef geometry, const std::optional<Tensor>& rows,
    const std::optional<Tensor>& row_ends, const std::optional<Tensor>& units, const std::optional<Tensor>& unit_ends) {
  Partial partial{{}, {}, geometry[1], geometry[2], geometry[3], geometry[4], geometry[5], query.size(2) / key.size(2), query.size(3)};
  const auto* domain = domains.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < domains.size(0); i++, domain += 4) partial.domains.push_back({domain[0], domain[1], domain[2], domain[3]});
  if (!rows) {
    partial.problems.push_back({geometry[0], nullptr, nullptr, 0});
    return partial;
  }
  const int64_t *row_end = row_ends->const_data_ptr<int64_t>(), *unit_end = unit_ends->const_data_ptr<int64_t>();
  for (int64_t i = 0, row = 0, unit = 0; i < row_ends->numel(); row = row_end[i], unit = unit_end[i], i++)
    partial.problems.push_back(
        {row_end[i] - row, rows->const_data_ptr<int64_t>() + row, units->const_data_ptr<int64_t>() + unit, unit_end[i] - unit});
  return partial;
}

Masks masks_of(
    const std::optional<Tensor>& hidden, const std::optional<Tensor>& seed, double dropout_p, IntArrayRef offsets) {
  Masks masks;
  if (hidden) {
    masks.hidden = hidden->const_data_ptr<bool>();
    masks.hidden_batch = hidden->stride(0);
  }
  if (seed) {
    masks.is_dropped = true;
    masks.seed = static_cast<uint64_t>(seed->item<int64_t>());
    masks.threshold = static_cast<int32_t>(std::llround(dropout_p * 4294967296.0) - 2147483648LL);
    masks.keep_factor = static_cast<float>(1.0 / (1.0 - dropout_p));
    masks.query_offset = offsets[0];
    masks.key_offset = offsets[1];
  }
  return masks;
}

void attend(
    const Tensor& query, const Tensor& key, const Tensor& value, Tensor out, Tensor lse, const Tensor& domains,
    IntArrayRef geometry, const std::optional<Tensor>& rows, const std::optional<Tensor>& row_ends,
    const std::optional<Tensor>& units, const std::optional<Tensor>& unit_ends, const std::optional<Tensor>& hidden,
    const std::optional<Tensor>& seed, double dropout_p, IntArrayRef offsets, double scale, IntArrayRef first) {
  const Partial partial = partial_of(query, key, domains, geometry, rows, row_ends, units, unit_ends);
  forward(partial, masks_of(hidden, seed, dropout_p, offsets), {query, key, value, out, lse, scale, first[0], first[1]});
}

void attend_backward(
    const Tensor& grad_out, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& out, const Tensor& lse,
    const std::optional<Tensor>& grad_lse, Tensor grad_query, Tensor grad_key, Tensor grad_value, const Tensor& domains,
    IntArrayRef geometry, const std::optional<Tensor>& rows, const std::optional<Tensor>& row_ends,
    const std::optional<Tensor>& units, const std::optional<Tensor>& unit_ends, const std::optional<Tensor>& hidden,
    const std::optional<Tensor>& seed, double dropout_p, IntArrayRef offsets, double scale, IntArrayRef first) {
  const Partial partial = partial_of(query, key, domains, geometry, rows, row_ends, units, unit_ends);
  backward(
      partial, masks_of(hidden, seed, dropout_p, offsets),
      {grad_out, query, key, value, out, lse, grad_lse, grad_query, grad_key, grad_value, scale, first[0], first[1], first[2]});
}

}  // namespace
}  // namespace dilated_attention

#define GEOMETRY                                                                                       \
  "Tensor domains, int[] geometry, Tensor? rows, Tensor? row_ends, Tensor? units, Tensor? unit_ends, " \
  "Tensor? hidden, Tensor? seed, float dropout_p, int[] offsets, float scale, int[] first) -> ()"

TORCH_LIBRARY(dilated_attention_native, m) {
  m.def("forward(Tensor query, Tensor key, Tensor value, Tensor(a!) out, Tensor(b!) lse, " GEOMETRY, &dilated_attention::attend);
  m.def(
      "backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, Tensor? grad_lse, "
      "Tensor(a!) grad_query, Tensor(b!) grad_key, Tensor(c!) grad_value, " GEOMETRY,
      &dilated_attention::attend_backward);
}

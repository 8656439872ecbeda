#include <torch/library.h>

#include "kernels.h"

namespace dilated_attention {
namespace {

using at::IntArrayRef;
using at::Tensor;

// Makes a partial from Python's arguments. `geometry`: number of sequences, first query row, first key row, number of
// queries, number of keys, rows from query to query and from key to key, lower and upper bound of the band, keys per
// unit. `axes`: for every axis its size, and the distance between its domains in query rows, key rows and heads. With
// lists, `rows` and `units` concatenate those of all problems, and `row_ends` and `unit_ends` are the end of each.
// Without `rows`, problems are consecutive. Units are listed domain after domain, and reused cyclically if there are
// more domains; `gates` are optional.
Partial partial_of(
    const Tensor& query, const Tensor& value, int64_t ratio, IntArrayRef geometry, IntArrayRef heads, IntArrayRef axes,
    const std::optional<Tensor>& rows, const std::optional<Tensor>& row_ends, const std::optional<Tensor>& units,
    const std::optional<Tensor>& unit_ends, const std::optional<Tensor>& gates,
    const std::optional<Tensor>& grad_gates) {
  Partial partial{};
  for (int64_t batch = 0; batch < geometry[0]; batch++)
    for (const int64_t head : heads) partial.domains.push_back({batch, head, geometry[1], geometry[2], 0});
  for (size_t axis = 0; axis < axes.size(); axis += 4) {
    std::vector<Domain> domains;
    for (const Domain& first : partial.domains)
      for (int64_t i = 0; i < axes[axis]; i++)
        domains.push_back(
            {first.batch, first.head + i * axes[axis + 3], first.query_row + i * axes[axis + 1],
             first.key_row + i * axes[axis + 2], 0});
    partial.domains = std::move(domains);
  }
  partial.num_keys = geometry[4];
  partial.step = geometry[5];
  partial.key_step = geometry[6];
  partial.low = geometry[7];
  partial.high = geometry[8];
  partial.unit = geometry[9];
  partial.ratio = ratio;
  partial.head_dim = query.size(3);
  partial.value_dim = value.size(3);
  if (row_ends) {
    const int64_t* row_end = row_ends->const_data_ptr<int64_t>();
    for (int64_t i = 0, row = 0; i < row_ends->numel(); row = row_end[i++])
      partial.problems.push_back(
          {row_end[i] - row, rows ? 0 : row, rows ? rows->const_data_ptr<int64_t>() + row : nullptr});
  } else {
    partial.problems.push_back({geometry[3], 0, nullptr});
  }
  if (!unit_ends) return partial;
  const int64_t* unit_end = unit_ends->const_data_ptr<int64_t>();
  for (int64_t i = 0, unit = 0; i < unit_ends->numel(); unit = unit_end[i++])
    partial.lists.push_back(
        {unit_end[i] - unit, units->const_data_ptr<int64_t>() + unit,
         gates ? gates->const_data_ptr<float>() + unit : nullptr,
         grad_gates ? grad_gates->mutable_data_ptr<float>() + unit : nullptr});
  for (size_t i = 0; i < partial.domains.size() && !partial.lists.empty(); i++)
    partial.domains[i].first_list = i * partial.problems.size() % partial.lists.size();
  return partial;
}

bool is_empty(const Partial& partial) {
  return partial.domains.empty() || partial.problems.empty() || partial.num_keys == 0;
}

// `places`: positions of the first query and key of the slabs, and the first sequence's index in the batch.
Masks masks_of(
    const std::optional<Tensor>& hidden, const std::optional<Tensor>& seed, double dropout_p, IntArrayRef places,
    const Origin& of_keys) {
  Masks masks;
  if (hidden) masks.hidden.emplace(*hidden, of_keys.row, of_keys.head);
  if (seed) {
    masks.is_dropped = true;
    masks.seed = static_cast<uint64_t>(seed->item<int64_t>());
    masks.threshold = static_cast<int32_t>(std::llround(dropout_p * 4294967296.0) - 2147483648LL);
    masks.keep_factor = static_cast<float>(1.0 / (1.0 - dropout_p));
    masks.query_offset = places[0];
    masks.key_offset = places[1];
    masks.first_batch = places[2];
  }
  return masks;
}

Terms terms_of(
    double scale, double softcap, const std::optional<Tensor>& line, int64_t origin, const std::optional<Tensor>& key_bias,
    const std::optional<Tensor>& coordinates, int64_t first_query, const Origin& of_keys) {
  Terms terms{static_cast<float>(scale)};
  if (softcap != 0.0) {  // a cap of 1e-30 or less makes all scores 0
    terms.softcap = static_cast<float>(std::max(softcap, 1e-30));
    // Not subnormal: it is multiplied by the -inf of hidden keys, where a subnormal number may count as 0.
    terms.scale_in_caps = static_cast<float>(std::clamp<double>(scale / softcap, std::numeric_limits<float>::min(), 1e30));
  }
  if (line) {
    terms.line = line->const_data_ptr<float>();
    terms.length = line->size(1);
    terms.origin = origin;
  }
  if (key_bias) terms.key_bias.emplace(*key_bias, of_keys.row, of_keys.head);
  if (coordinates) {
    terms.coordinates = coordinates->const_data_ptr<float>();
    terms.num_rows = coordinates->size(2);
    terms.first_query = first_query;
  }
  return terms;
}

void attend(
    const Tensor& query, const Tensor& key, const Tensor& value, Tensor out, Tensor lse, IntArrayRef first,
    int64_t ratio, IntArrayRef geometry, IntArrayRef heads, IntArrayRef axes, const std::optional<Tensor>& rows,
    const std::optional<Tensor>& row_ends, const std::optional<Tensor>& units, const std::optional<Tensor>& unit_ends,
    const std::optional<Tensor>& hidden, const std::optional<Tensor>& seed, double dropout_p, IntArrayRef places,
    double scale, const std::optional<Tensor>& gates, double softcap, const std::optional<Tensor>& line, int64_t origin,
    const std::optional<Tensor>& key_bias, const std::optional<Tensor>& coordinates, int64_t first_query) {
  const Partial partial =
      partial_of(query, value, ratio, geometry, heads, axes, rows, row_ends, units, unit_ends, gates, {});
  if (is_empty(partial)) return;
  const Origin of_out{first[0], first[1]}, of_keys{first[2], first[3]};
  const Terms terms = terms_of(scale, softcap, line, origin, key_bias, coordinates, first_query, of_keys);
  forward(partial, masks_of(hidden, seed, dropout_p, places, of_keys), {query, key, value, out, lse, terms, of_out, of_keys});
}

void attend_backward(
    const Tensor& grad_out, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& out, const Tensor& lse,
    const std::optional<Tensor>& grad_lse, Tensor grad_query, Tensor grad_key, Tensor grad_value, IntArrayRef first,
    int64_t ratio, IntArrayRef geometry, IntArrayRef heads, IntArrayRef axes, const std::optional<Tensor>& rows,
    const std::optional<Tensor>& row_ends, const std::optional<Tensor>& units, const std::optional<Tensor>& unit_ends,
    const std::optional<Tensor>& hidden, const std::optional<Tensor>& seed, double dropout_p, IntArrayRef places,
    double scale, const std::optional<Tensor>& gates, double softcap, const std::optional<Tensor>& line, int64_t origin,
    const std::optional<Tensor>& key_bias, const std::optional<Tensor>& coordinates, int64_t first_query,
    const std::optional<Tensor>& grad_gates, const std::optional<Tensor>& grad_line, const std::optional<Tensor>& grad_key_bias) {
  const Partial partial =
      partial_of(query, value, ratio, geometry, heads, axes, rows, row_ends, units, unit_ends, gates, grad_gates);
  if (is_empty(partial)) return;
  const Origin of_grad_query{first[0], first[1]}, of_grad_keys{first[2], first[3]}, of_keys{first[4], first[5]};
  const Terms terms = terms_of(scale, softcap, line, origin, key_bias, coordinates, first_query, of_keys);
  backward(
      partial, masks_of(hidden, seed, dropout_p, places, of_keys),
      {grad_out, query, key, value, out, lse, grad_lse, grad_query, grad_key, grad_value, grad_line, grad_key_bias, terms,
       of_grad_query, of_grad_keys, of_keys});
}

// For estimates of memory (`kernels/native.py`).
std::vector<int64_t> sizes() { return {kKeysOfWindow, kPackedKeys, kPackedBytes, kAlignment, kRowsOfChunk}; }

}  // namespace
}  // namespace dilated_attention

#define PARTIAL                                                                                                  \
  "int[] first, int ratio, int[] geometry, int[] heads, int[] axes, Tensor? rows, Tensor? row_ends, "            \
  "Tensor? units, Tensor? unit_ends, Tensor? hidden, Tensor? seed, float dropout_p, int[] places, float scale, " \
  "Tensor? gates=None, float softcap=0.0, Tensor? line=None, int origin=0, Tensor? key_bias=None, " \
  "Tensor? coordinates=None, int first_query=0"

TORCH_LIBRARY(dilated_attention_native, m) {
  m.def("sizes", &dilated_attention::sizes);
  m.def("attend(Tensor query, Tensor key, Tensor value, Tensor(a!) out, Tensor(b!) lse, " PARTIAL ") -> ()");
  m.def(
      "attend_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, Tensor? grad_lse, "
      "Tensor(a!) grad_query, Tensor(b!) grad_key, Tensor(c!) grad_value, " PARTIAL
      ", Tensor(d!)? grad_gates=None, Tensor(e!)? grad_line=None, Tensor(f!)? grad_key_bias=None) -> ()");
}

// For CPU tensors only; fake tensors are handled by what Python registers.
TORCH_LIBRARY_IMPL(dilated_attention_native, CPU, m) {
  m.impl("attend", &dilated_attention::attend);
  m.impl("attend_backward", &dilated_attention::attend_backward);
}

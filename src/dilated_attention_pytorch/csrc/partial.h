// A partial: which rows of queries meet which rows of keys, as whole numbers.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <atomic>
#include <optional>
#include <vector>

#include "vectors.h"

namespace dilated_attention {

// Rows [B, rows, heads(, D)] of a tensor that begins with `first_row` and `first_head` of the whole.
template <class T>
class Rows {
 public:
  Rows(const at::Tensor& tensor, int64_t first_row = 0, int64_t first_head = 0)
      : batch_(tensor.stride(0)), row_(tensor.stride(1)), head_(tensor.stride(2)) {
    data_ = static_cast<T*>(const_cast<void*>(tensor.const_data_ptr())) - first_row * row_ - first_head * head_;
  }

  T* at(int64_t batch, int64_t row, int64_t head) const { return data_ + batch * batch_ + row * row_ + head * head_; }

 private:
  T* data_;
  int64_t batch_, row_, head_;
};

// Rows of one sequence and key/value head, from these on.
struct Domain {
  int64_t batch, head, query_row, key_row;
};

// Query rows of every domain that see the same keys, but for the band.
struct Problem {
  int64_t count;            // of query rows
  const int64_t* rows;      // from the first row of the domain on; null: every `step`-th
  const int64_t* units;     // ascending, the keys that they see; null: all
  int64_t num_units;
};

constexpr int64_t kNoBound = int64_t{1} << 60;

struct Partial {
  std::vector<Domain> domains;
  std::vector<Problem> problems;
  int64_t num_keys, step, key_step;  // of a domain; rows from one query to the next, and from one key
  int64_t low, high;                 // the i-th query of a problem sees the j-th key only if low <= j - i <= high
  int64_t unit;                      // keys of a unit
  int64_t ratio;                     // query heads of a key/value head
  int64_t head_dim;

  int64_t query_row(const Domain& domain, const Problem& problem, int64_t i) const {
    return domain.query_row + (problem.rows == nullptr ? i * step : problem.rows[i]);
  }

  int64_t key_row(const Domain& domain, int64_t j) const { return domain.key_row + j * key_step; }

  // Calls `body(begin, end)` for every run of keys in [begin, end) that any of the queries [first, stop) sees.
  template <class Body>
  void for_each_run(const Problem& problem, int64_t first, int64_t stop, int64_t begin, int64_t end, Body body) const {
    if (problem.units == nullptr) {
      begin = std::max(begin, first + low);
      end = std::min(end, stop + high);
      if (begin < end) body(begin, end);
      return;
    }
    const int64_t* last = problem.units + problem.num_units;
    const int64_t* next = std::lower_bound(problem.units, last, begin / unit);
    while (next < last && *next * unit < end) {
      const int64_t run = *next * unit;
      int64_t run_end = run + unit;
      for (next++; next < last && *next * unit == run_end; next++) run_end += unit;
      body(std::max(run, begin), std::min(run_end, end));
    }
  }
};

// Query rows that are computed together.
struct Tile {
  int64_t problem, first, stop;
};

inline std::vector<Tile> tiles_of(const Partial& partial, int64_t positions) {
  std::vector<Tile> tiles;
  for (size_t problem = 0; problem < partial.problems.size(); problem++)
    for (int64_t first = 0; first < partial.problems[problem].count; first += positions)
      tiles.push_back({static_cast<int64_t>(problem), first, std::min(first + positions, partial.problems[problem].count)});
  return tiles;
}

// Keys that are as if they were not there, and what dropout takes away.
struct Masks {
  std::optional<Rows<const bool>> hidden;  // [B, rows of keys, key/value heads]
  bool is_dropped = false;
  uint64_t seed = 0;
  int32_t threshold = 0;
  float keep_factor = 1.0f;
  int64_t query_offset = 0, key_offset = 0;  // positions of the first rows of the slabs
  int64_t first_batch = 0;                   // index of the first sequence in the batch

  bool hides(const Domain& domain, int64_t row) const { return hidden && *hidden->at(domain.batch, row, domain.head); }

  // A pair is kept iff its mixed state is not below the threshold: kernels/dropout.py.
  static uint64_t splitmix64(uint64_t x) {
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
  }
  uint32_t of_query(int64_t batch, int64_t head, int64_t row) const {
    return static_cast<uint32_t>(splitmix64(splitmix64(splitmix64(seed + first_batch + batch) + head) + query_offset + row));
  }
  uint32_t of_key(int64_t row) const { return static_cast<uint32_t>(splitmix64(splitmix64(seed + 1) + key_offset + row)); }
  bool keeps(uint32_t query, uint32_t key) const {
    uint32_t state = query ^ key;
    state = (state ^ (state >> 16)) * static_cast<uint32_t>(-2048144789);
    state = (state ^ (state >> 13)) * static_cast<uint32_t>(-1028477387);
    return static_cast<int32_t>(state) >= threshold;
  }
};

// Pieces of work of unequal size: every thread takes the next when it is done with one. `body` is called once by every
// thread, with a function that returns the next piece, or -1.
template <class Body>
void for_each_piece(int64_t count, const Body& body) {
  std::atomic<int64_t> next{0};
  const auto take = [&]() -> int64_t {
    const int64_t piece = next.fetch_add(1, std::memory_order_relaxed);
    return piece < count ? piece : -1;
  };
  at::parallel_for(0, std::min<int64_t>(at::get_num_threads(), count), 1, [&](int64_t, int64_t) { body(take); });
}

}  // namespace dilated_attention

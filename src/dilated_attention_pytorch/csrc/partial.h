// A partial: which query rows attend to which key rows, as integers.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <atomic>
#include <optional>
#include <vector>

#include "vectors.h"

namespace dilated_attention {

// Rows [B, rows, heads(, D)] of a tensor whose first row and head are `first_row` and `first_head` of the whole.
template <class T>
class Rows {
 public:
  Rows(const at::Tensor& tensor, int64_t first_row = 0, int64_t first_head = 0)
      : batch_(tensor.stride(0)), row_(tensor.stride(1)), head_(tensor.stride(2)) {
    data_ = static_cast<T*>(const_cast<void*>(tensor.const_data_ptr())) - first_row * row_ - first_head * head_;
  }

  T* at(int64_t batch, int64_t row, int64_t head) const { return data_ + batch * batch_ + row * row_ + head * head_; }

  // Number of elements from one row to the next.
  int64_t row_stride() const { return row_; }

 private:
  T* data_;
  int64_t batch_, row_, head_;
};

// A sequence, a key/value head and their first rows. With lists, those of its problems begin at `first_list`.
struct Domain {
  int64_t batch, head, query_row, key_row, first_list;
};

// Query rows of every domain that see the same keys, apart from the band.
struct Problem {
  int64_t count;        // number of query rows
  int64_t position;     // position of the first one with respect to the band; the others follow it
  const int64_t* rows;  // relative to the domain's first row; null: every `step`-th row from the position on
};

// Keys that the queries of a problem see, as units.
struct List {
  int64_t count;
  const int64_t* units;  // ascending; repeated units count repeatedly
  const float* gates;    // added to the scores of each unit; null: none
  float* grad_gates;     // their gradients are added here; null: none
};

// Consecutive keys [begin, end) with one gate.
struct Run {
  int64_t begin, end;
  float gate = 0.0f;
  float* grad_gate = nullptr;
};

// Query rows that are computed together.
struct Tile {
  int64_t problem, first, stop;
};

constexpr int64_t kNoBound = int64_t{1} << 60;

struct Partial {
  std::vector<Domain> domains;
  std::vector<Problem> problems;
  std::vector<List> lists;           // one per problem; none: all keys are seen
  int64_t num_keys, step, key_step;  // per domain; rows from one query to the next, and from one key to the next
  int64_t low, high;                 // the query at position i sees key j only if low <= j - i <= high
  int64_t unit;                      // keys per unit
  int64_t ratio;                     // query heads per key/value head
  int64_t head_dim, value_dim;       // width of queries and keys, and of values

  int64_t query_row(const Domain& domain, const Problem& problem, int64_t i) const {
    return domain.query_row + (problem.rows == nullptr ? (problem.position + i) * step : problem.rows[i]);
  }

  // Index of a query among the keys: its position, or its row where rows are listed.
  int64_t query_index(const Problem& problem, int64_t i) const {
    return problem.rows == nullptr ? problem.position + i : problem.rows[i];
  }

  int64_t key_row(const Domain& domain, int64_t j) const { return domain.key_row + j * key_step; }

  bool has_gates() const { return !lists.empty() && lists[0].gates != nullptr; }

  // Number of pairs of a query and a key that it sees, roughly: under a band, every row counts as its problem's middle one.
  double pairs() const {
    double pairs = 0.0;
    for (size_t i = 0; i < problems.size(); i++) {
      const int64_t middle = problems[i].position + problems[i].count / 2;
      double keys = 0.0;
      if (lists.empty())
        keys = static_cast<double>(domains.size()) *
            static_cast<double>(std::max<int64_t>(0, std::min(num_keys, middle + high + 1) - std::max<int64_t>(0, middle + low)));
      else
        for (const Domain& domain : domains) keys += static_cast<double>(lists[domain.first_list + i].count * unit);
      pairs += keys * static_cast<double>(problems[i].count * ratio);
    }
    return pairs;
  }

  // Position of a tile's first query.
  int64_t position(const Tile& tile) const { return problems[tile.problem].position + tile.first; }

  // Calls `body(run)` for every run of keys in [begin, end) that any query of a tile sees.
  template <class Body>
  void for_each_run(const Domain& domain, const Tile& tile, int64_t begin, int64_t end, Body body) const {
    const int64_t stop = position(tile) + tile.stop - tile.first;
    const int64_t least = std::max(begin, position(tile) + low), most = std::min(end, stop + high);
    if (lists.empty()) {
      if (least < most) body(Run{least, most});
      return;
    }
    const List& list = lists[domain.first_list + tile.problem];
    const int64_t* last = list.units + list.count;
    const int64_t* next = std::lower_bound(list.units, last, begin / unit);
    while (next < last && *next * unit < most) {
      const int64_t place = next - list.units;
      Run run{std::max(*next * unit, least), (*next + 1) * unit};
      next++;
      if (list.gates == nullptr) {
        for (; next < last && *next * unit == run.end; next++) run.end += unit;
      } else {
        run.gate = list.gates[place];
        if (list.grad_gates != nullptr) run.grad_gate = list.grad_gates + place;
      }
      run.end = std::min(run.end, most);
      if (run.begin < run.end) body(run);
    }
  }
};

inline int64_t longest_problem(const Partial& partial) {
  int64_t rows = 1;
  for (const Problem& problem : partial.problems) rows = std::max(rows, problem.count);
  return rows;
}

inline std::vector<Tile> tiles_of(const Partial& partial, int64_t positions) {
  std::vector<Tile> tiles;
  for (size_t problem = 0; problem < partial.problems.size(); problem++)
    for (int64_t first = 0; first < partial.problems[problem].count; first += positions)
      tiles.push_back({static_cast<int64_t>(problem), first, std::min(first + positions, partial.problems[problem].count)});
  return tiles;
}

// Hidden keys and dropout.
struct Masks {
  std::optional<Rows<const bool>> hidden;  // [B, rows of keys, key/value heads]
  bool is_dropped = false;
  uint64_t seed = 0;
  int32_t threshold = 0;
  float keep_factor = 1.0f;
  int64_t query_offset = 0, key_offset = 0;  // positions of the first rows of the slabs
  int64_t first_batch = 0;                   // index of the first sequence in the batch

  bool hides(const Domain& domain, int64_t row) const { return hidden && *hidden->at(domain.batch, row, domain.head); }

  // A pair is kept iff its mixed state is not below the threshold, as in kernels/dropout.py.
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

// What a thread does in a microsecond, and how many microseconds another thread must save: beside busy processes, waiting
// for one takes milliseconds.
constexpr double kOperations = 5e4, kBytes = 3e4, kWorthAThread = 100.0;

// Number of threads for some work, which is the same whenever it is asked for that work.
inline int64_t threads_for(double operations, double bytes) {
  const double time = operations / kOperations + bytes / kBytes;
  int64_t threads = 1;
  while (threads < at::get_num_threads() && time / static_cast<double>(threads * (threads + 1)) >= kWorthAThread) threads++;
  return threads;
}

// Pieces of work of unequal size: every thread takes the next piece when it is done with one. `body` is called once per
// thread, with a function that returns the next piece, or -1.
template <class Body>
void for_each_piece(int64_t count, int64_t threads, const Body& body) {
  std::atomic<int64_t> next{0};
  const auto take = [&]() -> int64_t {
    const int64_t piece = next.fetch_add(1, std::memory_order_relaxed);
    return piece < count ? piece : -1;
  };
  at::parallel_for(0, std::min(threads, count), 1, [&](int64_t, int64_t) { body(take); });
}

}  // namespace dilated_attention
